"""One step as a value: what the scheduler decided, what the runner answers.

A plan is frozen and serialisable: every rank could build its own batch from it. It never holds
a token that has not come back from the device; a row that feeds its own last sampled token says
so with `token_ids=None` and the device knows it (DESIGN.md, rule 4).

*Row*: the place of a running sequence in the device's state arrays (0 … max_num_seqs - 1). A row
is reused only after every plan that names its old sequence has resolved.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hillstar.engine.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowInit:
    """A sequence enters the batch (admitted, or back after preemption): its whole row state."""

    row: int
    params: SamplingParams
    num_prompt_tokens: int
    history: np.ndarray  # int32 [num_prompt + num_output so far]: penalties count these


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One sequence's share of a step: feed `num_tokens` tokens from position `start` on."""

    row: int
    start: int  # tokens of this sequence whose KV is there before the step
    num_tokens: int  # >= 1
    token_ids: np.ndarray | None  # int32 [num_tokens]; None: the row's last sampled token (1)
    new_blocks: np.ndarray  # int32 [n], appended to the row's block table before the step
    sample: bool  # sample from the last token's logits (its position: start + num_tokens) …
    num_drafts: int = 0  # … and from those of as many tokens before it: all but the first drafted

    @property
    def num_samples(self) -> int:
        return self.num_drafts + 1 if self.sample else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step. Order on the device: `copies`, `inits`, block tables, then the forward pass."""

    step: int
    rows: tuple[PlanRow, ...]
    inits: tuple[RowInit, ...] = ()  # an init empties the row's block table first
    copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block), whole blocks

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back, in the order of the plan's rows: `num_samples` of each.

    token_ids: int32 `[num_samples]`. logprobs: float32 `[num_samples]`, top_ids / top_logprobs:
    `[num_samples, k]`, where k is the batch's largest `top_logprobs`; present when any row asks.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def logprobs_of(self, samples: range, num_top: int | None) -> list[TokenLogprobs] | None:
        """Those of some samples for a sequence that asked for `num_top`, or for none at all."""
        if num_top is None:
            return None
        return [self._logprobs_of(index, num_top) for index in samples]

    def _logprobs_of(self, index: int, num_top: int) -> TokenLogprobs:
        assert self.logprobs is not None, "the plan asked for logprobs"
        top: list[tuple[int, float]] = []
        if num_top:
            assert self.top_ids is not None and self.top_logprobs is not None
            ids = self.top_ids[index, :num_top].tolist()
            top = list(zip(ids, self.top_logprobs[index, :num_top].tolist(), strict=True))
        return TokenLogprobs(float(self.logprobs[index]), top)


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled. Called once, in the order of the plans.

        A runner without asynchronous hardware (the CPU's) computes here: `run` only enqueues.
        So tokens of step n reach clients before step n+1 is computed, with the same loop.
        """
        ...


class Runner(Protocol):
    """Executes batches in order. Owned and called by the loop thread alone."""

    def run(self, batch: "Batch") -> Pending:
        """Launch a step; never waits for an earlier one."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A plan as arrays (host memory, numpy), built by `engine.batch.BatchBuilder`.

    T = tokens fed, R = plan rows, S = tokens that are sampled from.
    """

    plan: Plan
    token_ids: np.ndarray  # int32 [T]; -1 where it is the row's last sampled token
    positions: np.ndarray  # int32 [T]
    rows: np.ndarray  # int32 [R]: row in the device's state arrays
    cu_seqlens_q: np.ndarray  # int32 [R + 1]
    context_lens: np.ndarray  # int32 [R]: tokens with KV after the step
    block_tables: np.ndarray  # int32 [R, max blocks of a row in this batch], 0-padded
    slot_mapping: np.ndarray  # int64 [T]: block * block_size + offset
    sample_rows: np.ndarray  # int32 [S]: which of the R rows they belong to
    sample_tokens: np.ndarray  # int32 [S]: which of the T tokens they are
