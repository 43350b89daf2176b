"""A plan while it is being made: a draft is something else here."""

import numpy as np

from hillstar.engine.pace import Load
from hillstar.engine.plan import Plan, PlanRow, RowInit
from hillstar.engine.sequence import Sequence


class Sketch:
    """Who gets how many tokens of one step's budget, and who has just entered the batch."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # what is left of it
        self.shares: dict[Sequence, int] = {}
        self.drafted: dict[Sequence, np.ndarray] = {}  # int32 [n]: the last of a share's tokens
        self.entered: list[Sequence] = []
        self.has_preempted = False
        self.has_decoders = False  # running sequences that want one token, fed before all others
        self.is_slow = False  # it takes no longer prompts: its decoders would wait too long
        self.num_prefill_tokens = 0
        self.load = Load()

    @property
    def is_full(self) -> bool:
        """Whether nobody new gets a token in it."""
        return self.budget <= 0 or self.is_slow

    def give(self, sequence: Sequence, num_tokens: int) -> None:
        """Feed it so many tokens, whose places in its blocks are there; once a step."""
        self.shares[sequence] = num_tokens
        self.budget -= num_tokens
        self.load = self.load.plus(sequence.num_planned, num_tokens)
        if num_tokens > 1:
            self.num_prefill_tokens += num_tokens

    def add_drafted(self, sequence: Sequence, tokens: np.ndarray) -> None:
        """Let it feed these behind its last token."""
        self.drafted[sequence] = tokens
        self.shares[sequence] += len(tokens)
        self.budget -= len(tokens)
        self.load = self.load.plus(sequence.num_planned + 1, len(tokens), is_draft=True)

    def num_own_tokens(self, sequence: Sequence) -> int:
        """Of its share, those that are its own and not drafted."""
        return self.shares[sequence] - len(self.drafted.get(sequence, ()))

    def take_back(self, sequence: Sequence) -> None:
        """Its part of the load stays: a step in which somebody gave way takes no new prompts."""
        self.budget += self.shares.pop(sequence, 0)
        self.drafted.pop(sequence, None)

    def seal(self, step: int, copies: tuple[tuple[int, int], ...]) -> Plan:
        """The plan. From here on it counts as launched: its sequences are that much further."""
        inits = tuple(_init(sequence) for sequence in self.entered)
        rows = tuple(
            _row(sequence, count, self.drafted.get(sequence), step)
            for sequence, count in self.shares.items()
        )
        return Plan(step=step, rows=rows, inits=inits, copies=copies)


def _init(sequence: Sequence) -> RowInit:
    return RowInit(
        row=sequence.row,
        params=sequence.params,
        num_prompt_tokens=sequence.num_prompt_tokens,
        history=sequence.tokens.slice(0, len(sequence.tokens)),
    )


def _row(sequence: Sequence, num_tokens: int, drafted: np.ndarray | None, step: int) -> PlanRow:
    assert sequence.table is not None, f"{sequence.sequence_id} does not run"
    start, end = sequence.num_planned, sequence.num_planned + num_tokens
    num_drafts = 0 if drafted is None else len(drafted)
    is_complete = end - num_drafts == len(sequence.tokens) + sequence.num_pending
    token_ids = None
    if not sequence.num_pending:
        token_ids = sequence.tokens.slice(start, end - num_drafts)
        if drafted is not None:
            token_ids = np.concatenate([token_ids, drafted])
    row = PlanRow(
        row=sequence.row,
        start=start,
        num_tokens=num_tokens,
        token_ids=token_ids,
        new_blocks=sequence.table.blocks[sequence.num_sent_blocks :],
        sample=is_complete and sequence.max_output_tokens > 0,
        num_drafts=num_drafts,
    )
    sequence.num_sent_blocks = len(sequence.table.blocks)
    sequence.num_planned = end
    sequence.num_pending += row.num_samples
    sequence.num_in_flight += 1
    sequence.last_step = step
    return row
