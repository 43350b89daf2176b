"""Who drafts how much in a step, and what became of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hillstar.engine.messages import SamplingParams
from hillstar.engine.sequence import Sequence
from hillstar.engine.spec.lookup import Lookup
from hillstar.engine.spec.policy import Acceptance, DecodeCost, num_worthwhile

_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Drafter:
    """What is known of one sequence."""

    lookup: Lookup
    acceptance: Acceptance = field(default_factory=Acceptance)


class Speculation:
    """Owns what is known of steps' costs and of each sequence that drafts.

    A draft is looked up behind a sequence's last token, so no plan is made while one is on its
    way. That costs nothing where a step is computed when its result is asked for, on a CPU.
    """

    def __init__(self) -> None:
        self._cost = DecodeCost()
        self._drafters: dict[str, _Drafter] = {}
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def must_wait(self, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence's last token has not come back."""
        return any(sequence.num_pending for sequence in running)

    def draft(
        self, sequence: Sequence, most: int, num_tokens: int, num_expected: float
    ) -> tuple[np.ndarray, float]:
        """int32 `[n]`, n <= most: tokens that may follow the sequence's last one and are worth
        their place in a step of so far `num_tokens` tokens that will yield `num_expected`; and how
        many of them are likely to be right."""
        if most <= 0 or _has_penalties(sequence.params):
            return _NOTHING, 0.0
        drafter = self._drafters.get(sequence.sequence_id)
        if drafter is None:
            drafter = _Drafter(Lookup(sequence.tokens))
            self._drafters[sequence.sequence_id] = drafter
        rate = drafter.acceptance.rate
        count = num_worthwhile(rate, most, num_tokens, num_expected, self._cost)
        tokens = drafter.lookup.propose(count) if count else _NOTHING
        return tokens, sum(rate**i for i in range(1, len(tokens) + 1))

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._drafters.pop(sequence.sequence_id, None)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What became of a sequence's draft."""
        self._drafters[sequence.sequence_id].acceptance.observe(num_drafted, num_accepted)
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += num_accepted

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step that only decoded took this long."""
        self._cost.observe(num_tokens, seconds)


def accepted(drafted: np.ndarray, chosen: np.ndarray) -> int:
    """How many of the drafted tokens `[n]` are what was chosen in their places (`[n + 1]`: the
    last one follows them all). A token is a function of seed, position and logits, so it is the
    same whether it was drafted or not."""
    wrong = np.flatnonzero(drafted != chosen[: len(drafted)])
    return int(wrong[0]) if len(wrong) else len(drafted)


def _has_penalties(params: SamplingParams) -> bool:
    """Their counts would have to know the draft tokens before each one."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
