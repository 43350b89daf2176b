"""The forward pass on CUDA: graphs that replay over inputs that lie still.

A step's inputs travel as one packed array. Shapes come in buckets: a step takes the first captured
graph it fits in, padded with tokens and rows that do nothing (slot -1, no queries, no context).
One that fits none, a long prefill, runs the same body launch by launch: there the device is
slower than the host anyway.

Block tables live on the device, one for each row; a step uploads only the entries it adds.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.fixed_triton_ops import FixedTritonOps
from hillstar.engine.models.llama import Decoder
from hillstar.engine.models.triton_ops import DeviceBatch, PagedAttention, TritonOps
from hillstar.engine.models.weights import Weights
from hillstar.engine.plan import Batch
from hillstar.engine.transfer import to_device
from hillstar.kernels.attention_tuning import Tuning, fixed_tuning

_DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SHORT_CONTEXTS = (512, 4096)  # of graphs whose contexts are split at fixed tokens
# A short prefill: a session's next turn, which begins with the last token of the one before.
_TURN_TOKENS = (32, 64, 80, 128, 256)
_TURN_ROWS = (1, 8)
_PREFILL_TOKENS = 512  # of a step that has no graph
_NUM_COMPILERS = 8  # threads


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a step or a graph: tokens, rows, the most tokens that a row feeds, and that it has."""

    num_tokens: int
    num_rows: int
    max_q_len: int
    max_context_len: int

    @staticmethod
    def of(batch: Batch) -> "Shape":
        """A step's own."""
        longest = int(np.diff(batch.cu_seqlens_q).max())
        context = int(batch.context_lens.max())
        return Shape(len(batch.token_ids), len(batch.rows), longest, context)

    def holds(self, other: "Shape") -> bool:
        """Whether a graph of this shape can compute a step of that one."""
        return (
            other.num_tokens <= self.num_tokens
            and other.num_rows <= self.num_rows
            and other.max_q_len <= self.max_q_len
            and other.max_context_len <= self.max_context_len
        )


def choose_shapes(
    max_num_seqs: int, max_context_len: int, *, is_fixed: bool = False
) -> tuple[Shape, ...]:
    """What is captured, the cheapest first: decode up to `max_num_seqs` rows, short prefills.

    is_fixed: contexts are split at fixed tokens, so that a graph for long ones holds many programs
        that do nothing for short ones.
    """
    largest = min(max_num_seqs, _DECODE_ROWS[-1])
    shorter = [n for n in _SHORT_CONTEXTS if n < max_context_len]
    decodes = [
        Shape(rows, rows, 1, context)
        for rows in (*(n for n in _DECODE_ROWS if n < largest), largest)
        for context in (*(shorter if is_fixed else ()), max_context_len)
    ]
    turns = [
        Shape(tokens, min(rows, max_num_seqs), tokens, max_context_len)
        for rows in _TURN_ROWS
        for tokens in _TURN_TOKENS
    ]
    return (*decodes, *turns)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of one packed int32 array, in this order. T tokens, R rows of the shape."""

    token_ids: torch.Tensor  # [T]; -1: the last sampled token of `token_rows`
    token_rows: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]; -1: not stored
    rows: torch.Tensor  # [R]
    context_lens: torch.Tensor  # [R]
    sampled: torch.Tensor  # [R]: indices of the tokens that are sampled from
    cu_seqlens_q: torch.Tensor  # [R + 1]

    @staticmethod
    def of(packed: torch.Tensor, shape: Shape) -> "StepInputs":
        """packed: int32, as `pack` lays it out for the shape."""
        tokens, rows = shape.num_tokens, shape.num_rows
        ends = np.cumsum([tokens] * 4 + [rows] * 3 + [rows + 1]).tolist()
        return StepInputs(*(packed[i:j] for i, j in pairwise([0, *ends])))

    @staticmethod
    def pack(batch: Batch, shape: Shape) -> np.ndarray:
        """int32; neutral values where the batch is smaller than the shape."""
        token_rows = np.repeat(batch.rows, np.diff(batch.cu_seqlens_q))
        tokens, rows = shape.num_tokens, shape.num_rows
        return np.concatenate(
            [
                _padded(batch.token_ids, tokens, 0),
                _padded(token_rows, tokens, 0),
                _padded(batch.positions, tokens, 0),
                _padded(batch.slot_mapping, tokens, -1),
                _padded(batch.rows, rows, 0),
                _padded(batch.context_lens, rows, 0),
                _padded(batch.sample_tokens, rows, 0),
                _padded(batch.cu_seqlens_q, rows + 1, batch.cu_seqlens_q[-1]),
            ]
        )


def _padded(array: np.ndarray, length: int, value: int) -> np.ndarray:
    padded = np.full(length, value, dtype=np.int32)
    padded[: len(array)] = array
    return padded


class BlockTables:
    """The device's table of every row, kept up by what plans add. Owned by `CudaForward`."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = [0] * max_num_seqs

    def apply(self, batch: Batch) -> None:
        """Append the plan's new blocks, in order of the stream."""
        for init in batch.plan.inits:
            self._num_blocks[init.row] = 0
        added = [entry for entry in batch.plan.rows if len(entry.new_blocks)]
        if not added:
            return
        rows = np.repeat([e.row for e in added], [len(e.new_blocks) for e in added])
        columns = np.concatenate([self._columns(e.row, len(e.new_blocks)) for e in added])
        blocks = np.concatenate([e.new_blocks for e in added])
        patch = to_device(np.stack([rows, columns, blocks]), self.tables.device)
        self.tables[patch[0], patch[1]] = patch[2].int()

    def _columns(self, row: int, count: int) -> np.ndarray:
        first = self._num_blocks[row]
        self._num_blocks[row] = first + count
        return np.arange(first, first + count)


class CudaForward:
    """The `Forward` of a GPU. Owns the graphs and their inputs, and the block tables."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        *,
        max_position: int,
        last_tokens: torch.Tensor,
        deterministic: bool,
    ) -> None:
        """Captures the graphs. last_tokens: int32 `[max_num_seqs]` on the device, the last
        sampled token of every row. deterministic: a token's logits are the same bits whatever
        is computed beside it."""
        self._device = last_tokens.device
        ops = (FixedTritonOps if deterministic else TritonOps)(config, weights.embedding)
        self._decoder = Decoder(config, weights, ops)
        self._attention = PagedAttention(
            config,
            cache,
            device=self._device,
            max_position=max_position,
            tuning=_fixed_tuning(config, cache) if deterministic else None,
        )
        max_blocks = -(-max_position // self._attention.block_size)
        self._tables = BlockTables(len(last_tokens), max_blocks, self._device)
        self._last_tokens = last_tokens
        longest = max_blocks * self._attention.block_size
        shapes = choose_shapes(len(last_tokens), longest, is_fixed=deterministic)
        self._graphs = self._capture_all(shapes, longest)

    def __call__(self, batch: Batch) -> torch.Tensor:
        """See `Forward`."""
        self._tables.apply(batch)
        shape = Shape.of(batch)
        num_sampled = len(batch.sample_rows)
        for graph in self._graphs:
            if graph.shape.holds(shape):
                logits = graph.replay(StepInputs.pack(batch, graph.shape))
                break
        else:
            packed = to_device(StepInputs.pack(batch, shape), self._device)
            logits = self._body(StepInputs.of(packed, shape), shape, num_sampled)
        if shape.max_q_len == 1 and num_sampled < shape.num_rows:
            return logits[to_device(batch.sample_rows, self._device)]
        return logits[:num_sampled]

    def _body(self, inputs: StepInputs, shape: Shape, num_sampled: int) -> torch.Tensor:
        """Embedding to logits: what is captured, and what runs as it is.

        Logits of the tokens that are sampled from; of all tokens where each row feeds one.
        """
        last = self._last_tokens.index_select(0, inputs.token_rows)
        token_ids = torch.where(inputs.token_ids < 0, last, inputs.token_ids)
        attend = self._attention.step(
            DeviceBatch(
                positions=inputs.positions,
                slot_mapping=inputs.slots,
                block_tables=self._tables.tables.index_select(0, inputs.rows),
                cu_seqlens_q=inputs.cu_seqlens_q,
                context_lens=inputs.context_lens,
                max_q_len=shape.max_q_len,
                max_context_len=shape.max_context_len,
            )
        )
        sampled = None if shape.max_q_len == 1 else inputs.sampled[:num_sampled]
        return self._decoder.forward(token_ids, sampled, attend)

    @torch.inference_mode()
    def _capture_all(self, shapes: Sequence[Shape], longest: int) -> tuple["_Graph", ...]:
        """The largest first, so that the others find their memory in its."""
        self._compile(shapes, longest)
        pool = torch.cuda.graph_pool_handle()
        graphs = [self._capture(shape, pool) for shape in reversed(shapes)]
        return tuple(reversed(graphs))

    def _compile(self, shapes: Sequence[Shape], longest: int) -> None:
        """Run every shape once, and a prefill that has no graph: that compiles kernels, several at
        a time, and lets libraries allocate, which a capture forbids.

        All on one stream: what kernels share (counters) belongs to it, and so does the order.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())

        def run(shape: Shape) -> None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                self._body(StepInputs.of(self._idle(shape), shape), shape, shape.num_rows)

        prefill = Shape(_PREFILL_TOKENS, 1, _PREFILL_TOKENS, longest)
        with ThreadPoolExecutor(_NUM_COMPILERS) as threads:
            list(threads.map(run, (prefill, *shapes)))
        torch.cuda.current_stream().wait_stream(stream)

    def _idle(self, shape: Shape) -> torch.Tensor:
        """Inputs of a step that does nothing."""
        packed = torch.zeros(
            4 * shape.num_tokens + 4 * shape.num_rows + 1, dtype=torch.int32, device=self._device
        )
        StepInputs.of(packed, shape).slots.fill_(-1)
        return packed

    def _capture(self, shape: Shape, pool: Any) -> "_Graph":
        packed = self._idle(shape)
        graph = torch.cuda.CUDAGraph()
        # Other threads may be loading weights: what they do on their streams is no concern of it.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self._body(StepInputs.of(packed, shape), shape, shape.num_rows)
        return _Graph(shape, graph, packed, logits)


def _fixed_tuning(config: ModelConfig, cache: KVCache) -> Tuning:
    group = config.num_heads // config.num_kv_heads
    return fixed_tuning(group, config.head_dim, cache.pool.itemsize)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured body with the input it reads and the logits it writes."""

    shape: Shape
    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor
    logits: torch.Tensor

    def replay(self, packed: np.ndarray) -> torch.Tensor:
        self.packed.copy_(torch.from_numpy(packed).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.logits
