"""A runner whose KV cache holds token ids, so that any mistake about blocks changes the output.

The next token is a hash of the whole context, read back through the block table of the batch.
A block shared too early, copied too late, evicted in use or written by two owners: each gives
another context, another hash, another token than `fake_generate`, which knows no blocks at all.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from hillstar.engine.messages import SamplingParams
from hillstar.engine.plan import Batch, Pending, StepResult

EOS_ID = 0


@dataclass(frozen=True)
class FakeModel:
    """token = hash(seed, context); EOS with probability `eos_probability`, unless masked.

    refrain: in two of three positions the token repeats the one this far back, so that what a
    sequence says can be guessed from what it has said, and not always rightly.
    """

    vocab_size: int = 50
    eos_probability: float = 0.0
    refrain: int | None = None

    def next_token(self, context: np.ndarray, params: SamplingParams, num_output: int) -> int:
        seed = params.seed if params.temperature else 0
        digest = zlib.crc32(np.asarray(context, dtype="<i4").tobytes(), seed & 0xFFFFFFFF)
        if self.refrain is not None and len(context) > self.refrain and digest % 3:
            token = int(context[-self.refrain])
            if token != EOS_ID:
                return token
        may_stop = num_output >= params.min_tokens and not params.ignore_eos
        if may_stop and (digest >> 12) / (1 << 20) < self.eos_probability:
            return EOS_ID
        return 1 + digest % (self.vocab_size - 1)


def fake_generate(
    prompt: list[int], params: SamplingParams, model: FakeModel, max_output_tokens: int
) -> list[int]:
    """What the model says when it runs alone, without a cache."""
    tokens = list(prompt)
    for num_output in range(max_output_tokens):
        token = model.next_token(np.array(tokens), params, num_output)
        tokens.append(token)
        if token == EOS_ID or token in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class _Row:
    params: SamplingParams
    num_prompt_tokens: int
    blocks: list[int]
    last_token: int = -1


class FakeRunner:
    """Executes batches in order: in `result()` like the CPU's runner, or at once if `eager`."""

    def __init__(
        self, model: FakeModel, num_blocks: int, block_size: int, *, eager: bool = False
    ) -> None:
        self._model = model
        self._kv = np.full((num_blocks, block_size), -7, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self._eager = eager
        self._num_executed = 0
        self.num_tokens_fed = 0

    def run(self, batch: Batch) -> Pending:
        pending = _FakePending(self, batch)
        if self._eager:
            pending.execute()
        return pending

    def execute(self, batch: Batch) -> StepResult:
        plan = batch.plan
        assert plan.step == self._num_executed, "plans execute in order"
        self._num_executed += 1
        self._copy(plan.copies)
        for init in plan.inits:
            self._rows[init.row] = _Row(init.params, init.num_prompt_tokens, [])
        token_ids = batch.token_ids.astype(np.int64)
        for index, entry in enumerate(plan.rows):
            row = self._rows[entry.row]
            row.blocks += entry.new_blocks.tolist()
            first, end = batch.cu_seqlens_q[index], batch.cu_seqlens_q[index + 1]
            fed = token_ids[first:end]
            fed[fed == -1] = row.last_token
            self._check_layout(batch, index, row)
        self._kv.reshape(-1)[batch.slot_mapping] = token_ids
        self.num_tokens_fed += len(token_ids)
        samples = zip(batch.sample_rows, batch.positions[batch.sample_tokens] + 1, strict=True)
        return StepResult(np.array([self._sample(batch, *pair) for pair in samples], np.int32))

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """All copies at once: none may read what another writes."""
        sources = [source for source, _ in copies]
        destinations = [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not set(sources) & set(destinations), "a copy reads what another writes"
        if copies:
            self._kv[destinations] = self._kv[sources]

    def _check_layout(self, batch: Batch, index: int, row: _Row) -> None:
        num_blocks = -(-int(batch.context_lens[index]) // self._kv.shape[1])
        table = batch.block_tables[index, :num_blocks].tolist()
        assert table == row.blocks[:num_blocks], "the batch's block table is the row's"

    def _sample(self, batch: Batch, index: int, length: int) -> int:
        row = self._rows[int(batch.rows[index])]
        num_blocks = -(-length // self._kv.shape[1])
        context = self._kv[batch.block_tables[index, :num_blocks]].reshape(-1)[:length]
        row.last_token = self._model.next_token(context, row.params, length - row.num_prompt_tokens)
        return row.last_token


class _FakePending:
    def __init__(self, runner: FakeRunner, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._result: StepResult | None = None

    def execute(self) -> None:
        self._result = self._runner.execute(self._batch)

    def result(self) -> StepResult:
        if self._result is None:
            self.execute()
        assert self._result is not None
        return self._result
