"""One response inside the engine: its tokens, how far it is, and where it stands.

Plain state: the scheduler owns every sequence and is the only one to change it.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hillstar.engine.messages import FinishReason, SamplingParams, Usage
from hillstar.engine.tokens import HashChain, TokenBuffer


class State(Enum):
    WAITING = "waiting"  # in the queue, without a row and without blocks
    RUNNING = "running"  # in the batch, with both
    PARKED = "parked"  # out of the batch as asked; its blocks are held like an idle lease's
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class BlockTable:
    """Which block holds which tokens: token t lies in `blocks[t // block_size]`.

    blocks: int32 `[n]`, all different; replaced when it changes, never written in place, so that
    plans may name parts of it.
    num_tokens: tokens whose KV is there by every plan that has resolved. The last blocks may be
    ahead of it: they were allocated for plans in flight.
    """

    blocks: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    num_tokens: int = 0

    def extend(self, blocks: np.ndarray) -> None:
        self.blocks = np.concatenate([self.blocks, blocks])

    def cut(self, num_blocks: int) -> np.ndarray:
        """Take away all but the first `num_blocks` blocks; returns them, the last one first."""
        rest = self.blocks[num_blocks:][::-1]
        self.blocks = self.blocks[:num_blocks]
        return rest


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """See the module. Lengths: `table.num_tokens <= num_planned <= len(tokens) + num_pending`."""

    sequence_id: str
    tenant: str
    priority: int
    params: SamplingParams
    lease_id: str | None
    tokens: TokenBuffer  # prompt and output, as far as they came back from the device
    chain: HashChain
    num_prompt_tokens: int
    max_output_tokens: int  # the smallest of max_tokens, the context's and the pool's room
    stop_ids: frozenset[int]
    arrival: int  # ordinal
    arrived_s: float
    resting_id: str | None  # the idle lease that its next admission dissolves

    state: State = State.WAITING
    erase: bool = False  # its lease was released with `erase` while it ran
    row: int = -1
    table: BlockTable | None = None  # when running
    num_planned: int = 0  # tokens with KV after every launched plan
    num_sent_blocks: int = 0  # how much of the table the device knows
    num_pending: int = 0  # sampled tokens that have not come back, behind drafts too
    num_in_flight: int = 0  # unresolved plans that name it
    last_step: int = -1  # the newest plan that names it
    num_preemptions: int = 0
    num_charged: int = 0  # tokens its tenant has paid for
    num_cached_tokens: int | None = None  # set at the first admission
    awaited: bytes | None = None  # identity of a block that another sequence is computing

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Tokens it could be fed in the next step; 0 when its last token is already in flight."""
        num_tokens = len(self.tokens) + self.num_pending
        most = self.num_prompt_tokens + self.max_output_tokens
        return 0 if self.max_output_tokens and num_tokens >= most else num_tokens - self.num_planned

    @property
    def standing(self) -> int:
        """Its priority, one higher for each time it had to give way: so that it ends some day."""
        return self.priority + self.num_preemptions

    @property
    def rank(self) -> tuple[int, int]:
        """Order among running sequences: the greatest gives way first."""
        return (-self.standing, self.arrival)

    @property
    def reason_to_stop(self) -> FinishReason | None:
        """Why the last token it was given is its last, if it is."""
        num_output = self.num_output_tokens
        if not num_output:
            return None
        if self.tokens.last in self.stop_ids and num_output > self.params.min_tokens:
            return "stop"
        return "length" if num_output >= self.max_output_tokens else None

    @property
    def is_prefilled(self) -> bool:
        """Whether it was to be prefilled only, and every plan that does it has resolved."""
        return (
            self.max_output_tokens == 0
            and self.table is not None
            and self.table.num_tokens == len(self.tokens)
        )

    @property
    def parking_id(self) -> str:
        """The lease that holds its blocks while it is parked; no server chooses such a name."""
        return f"\0parked:{self.sequence_id}"

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, self.num_cached_tokens or 0, self.num_output_tokens)
