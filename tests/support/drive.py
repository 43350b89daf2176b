"""A runner driven by hand: plans without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hillstar.engine.batch import BatchBuilder
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.messages import SamplingParams
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Pending, Plan, PlanRow, RowInit, StepResult
from hillstar.engine.runner import TorchRunner

GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@dataclass
class _Sequence:
    row: int
    tokens_fed: int = 0
    num_blocks: int = 0


@dataclass(frozen=True)
class Feed:
    """Feed a row: these tokens, or its last sampled one (None); then sample or not."""

    row: int
    token_ids: Sequence[int] | None = None
    sample: bool = True


@dataclass
class Drive:
    """Rows, blocks and plans of one runner. Blocks are handed out scattered, never reused."""

    config: ModelConfig
    weights: Weights
    num_blocks: int = 128
    block_size: int = 16
    max_num_seqs: int = 16
    device: str = "cpu"
    copies: tuple[tuple[int, int], ...] = ()  # of the next step
    runner: TorchRunner = field(init=False)
    cache: KVCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = KVCache(
            self.config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.weights.embedding.dtype,
            device=self.device,
        )
        self.runner = TorchRunner(
            self.config,
            self.weights,
            self.cache,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            eos_token_ids=self.config.eos_token_ids,
        )
        self._builder = BatchBuilder(
            max_num_seqs=self.max_num_seqs, max_blocks=self.num_blocks, block_size=self.block_size
        )
        self._free = np.random.default_rng(0).permutation(np.arange(1, self.num_blocks)).tolist()
        self._sequences: dict[int, _Sequence] = {}
        self._inits: list[RowInit] = []
        self._step = 0

    def admit(
        self,
        row: int,
        params: SamplingParams = GREEDY,
        *,
        prompt: Sequence[int],
        outputs: Sequence[int] = (),
    ) -> None:
        """The next step starts with this sequence in the row."""
        history = np.array([*prompt, *outputs], dtype=np.int32)
        self._inits.append(RowInit(row, params, len(prompt), history))
        self._sequences[row] = _Sequence(row)

    def launch(self, *feeds: Feed) -> Pending:
        rows = tuple(self._plan_row(feed) for feed in feeds)
        plan = Plan(self._step, rows, tuple(self._inits), self.copies)
        self._step += 1
        self._inits, self.copies = [], ()
        return self.runner.run(self._builder.build(plan))

    def step(self, *feeds: Feed) -> StepResult:
        return self.launch(*feeds).result()

    def _plan_row(self, feed: Feed) -> PlanRow:
        sequence = self._sequences[feed.row]
        count = 1 if feed.token_ids is None else len(feed.token_ids)
        start = sequence.tokens_fed
        sequence.tokens_fed += count
        needed = -(-sequence.tokens_fed // self.block_size)
        blocks = tuple(self._free.pop() for _ in range(needed - sequence.num_blocks))
        sequence.num_blocks = needed
        token_ids = None if feed.token_ids is None else np.array(feed.token_ids, dtype=np.int32)
        return PlanRow(feed.row, start, count, token_ids, blocks, feed.sample)


def generate(
    drive: Drive,
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams = GREEDY,
    *,
    row: int = 0,
    chunk: int = 1 << 20,
) -> list[int]:
    """One sequence on its own: prefill in chunks, then decode with a step in flight."""
    drive.admit(row, params, prompt=prompt)
    last = (len(prompt) - 1) // chunk * chunk
    for begin in range(0, last, chunk):
        drive.step(Feed(row, prompt[begin : begin + chunk], sample=False))
    tokens = [int(drive.step(Feed(row, prompt[last:])).token_ids[0])]
    pending: Pending | None = None
    for _ in range(num_tokens - 1):
        launched = drive.launch(Feed(row))
        if pending is not None:
            tokens.append(int(pending.result().token_ids[0]))
        pending = launched
    if pending is not None:
        tokens.append(int(pending.result().token_ids[0]))
    return tokens
