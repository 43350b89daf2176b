"""Who drafts how much in a step, and what became of it."""

from collections.abc import Iterable

import numpy as np

from hillstar.engine.messages import SamplingParams
from hillstar.engine.sequence import Sequence
from hillstar.engine.spec.lookup import Lookup
from hillstar.engine.spec.policy import StepCost, num_worthwhile


class Speculation:
    """Owns what is known of steps' costs; the drafts of a sequence lie with it.

    A draft is looked up behind a sequence's last token, so no plan is made while one is on its
    way. That costs nothing where a step is computed when its result is asked for, on a CPU.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0

    def must_wait(self, running: Iterable[Sequence]) -> bool:
        """Whether a running sequence's last token has not come back."""
        return any(sequence.num_pending for sequence in running)

    def draft(
        self, sequence: Sequence, most: int, num_tokens: int, num_expected: float
    ) -> np.ndarray:
        """int32 `[n]`, n <= most: tokens that may follow the sequence's last one and are worth
        their place in a step of so far `num_tokens` tokens that will yield `num_expected`."""
        if most <= 0 or _has_penalties(sequence.params):
            return np.empty(0, dtype=np.int32)
        rate = sequence.acceptance.rate
        count = num_worthwhile(rate, most, num_tokens, num_expected, self._cost)
        if not count:
            return np.empty(0, dtype=np.int32)
        if sequence.lookup is None:
            sequence.lookup = Lookup(sequence.tokens)
        return sequence.lookup.propose(count)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """What became of a sequence's draft."""
        sequence.acceptance.observe(num_drafted, num_accepted)
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
