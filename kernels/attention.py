"""Attention over the paged KV cache, for any mix of prefill chunks and decode rows in one call.

A *row* is one sequence's share of the step: `q_len` new query tokens at the end of `context`
tokens, whose keys and values are all in the cache already. Query at position p sees the keys at
positions `max(0, p - window + 1) … p` (window 0: from 0). Softmax is computed online over tiles
of the context (Dao 2023, "FlashAttention-2", algorithm 1) in float32; base-2 exponentials.

Packing. The query heads that share a KV head times the query tokens form the M side of the
products: row m of a tile is query token `m // group`, head `m % group`, so a key is read once for
all heads that need it. A tile's keys are gathered through the block table, `BLOCK_N` tokens at a
time, whatever the block size.

Two launches, whose grids depend on shapes and host bounds alone (so CUDA graphs may hold them):
* *short* rows (all their queries fit one 16-row tile: decode, small drafts):
  grid `(num_rows, num_kv_heads, num_splits)`;
* *long* rows (prefill chunks), left out if `max_q_len` excludes them:
  grid `(num_tokens // BLOCK_Q + num_rows, num_kv_heads, num_splits)`; tile slots of row i begin
  at `cu_seqlens_q[i] // BLOCK_Q + i`, which leaves each row at least the slots it needs.
Programs of the other kind's rows, and of slots without queries, exit at once.

Split context (Dao et al. 2023, "Flash-Decoding"): where the grid is too small for the device, a
tile's context is divided among `num_splits` programs, which leave normalised partial results and
their base-2 log-sum-exp in a workspace; `_reduce_kernel`, grid `(slots, num_kv_heads, tile rows)`,
weighs them together. A row's result depends on its own lengths, the tiling and `num_splits`, not
on its neighbours.

Layout: kv is one layer's view `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of the pool;
block offsets are 64 bits wide. Bytes moved a call:
`2 * num_kv_heads * head_dim * itemsize * sum(context)` (times the row's tiles when prefilling),
and q and out once.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit, jit_with


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one launch is cut: query rows and context tokens of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tilings of both launches, and the splits of the context (None: from the grid)."""

    short: Tiling
    long: Tiling
    num_splits: int | None = None


def choose_tuning(group_size: int, head_dim: int, itemsize: int) -> Tuning:
    """The tuning for a shape; it depends on the model alone, never on the batch.

    A stage of the pipeline holds 32 KiB of keys and values: three of them in flight hide the
    latency of HBM, and two programs still fit an SM. float32 has no tensor cores at full
    precision, so its tiles are bounded by registers instead.
    """
    dim = triton.next_power_of_2(head_dim)
    group = triton.next_power_of_2(group_size)
    block_n = max(16, min(128, 32768 // (2 * dim * itemsize)))
    if itemsize == 4:
        return Tuning(
            short=Tiling(max(16, group), min(32, block_n), num_warps=8, num_stages=2),
            long=Tiling(max(32, group), min(32, block_n), num_warps=8, num_stages=2),
        )
    block_m, num_warps = (128, 8) if dim <= 128 else (64, 4)
    return Tuning(
        short=Tiling(max(16, group), block_n, num_warps=4, num_stages=4),
        long=Tiling(max(block_m, group), min(64, block_n), num_warps=num_warps, num_stages=3),
    )


def choose_num_splits(num_programs: int, max_context_len: int, num_sms: int) -> int:
    """A power of two that fills two programs an SM, with at least 128 tokens a split."""
    if max_context_len <= 256:
        return 1
    splits = min(2 * num_sms // num_programs, max_context_len // 128, 64)
    return 1 << max(0, splits.bit_length() - 1)


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    max_q_len: int,
    max_context_len: int,
    window: int = 0,
    tuning: Tuning | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `paged_attention`: same arguments (the last two change nothing)."""
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, context in enumerate(context_lens.tolist()):
        begin, end = cu_seqlens_q[row : row + 2].tolist()
        blocks = block_tables[row, : -(-context // block_size)].long()
        # [blocks, 2, heads, block_size, dim] -> K, V: [heads, context, dim]
        gathered = kv[blocks].permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
        keys, values = gathered[:, :, :context].float()
        positions = torch.arange(context - (end - begin), context, device=q.device)[:, None]
        visible = torch.arange(context, device=q.device) <= positions
        if window:
            visible &= torch.arange(context, device=q.device) > positions - window
        # [tokens, KV heads, group, dim] -> [KV heads, group, tokens, dim]
        queries = q[begin:end].float().view(-1, num_kv_heads, group, head_dim)
        queries = queries.permute(1, 2, 0, 3)
        scores = queries @ keys[:, None].mT * scale
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1).nan_to_num()
        mixed = weights @ values[:, None]
        out[begin:end] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


@jit
def _locate(
    cu_seqlens_q: tl.tensor,
    tile: tl.tensor,
    num_rows: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
) -> Any:
    """The row of a tile slot, the first token of the row, the tile's first query in the row, and
    how many queries the tile has (0 or less: none, the program has nothing to do)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if IS_SHORT:
        row = tile
        q_start = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_start
        first = 0
        count = tl.where(q_len <= SHORT_Q, q_len, 0)
    else:
        rows = tl.arange(0, ROWS_PADDED)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0) // BLOCK_Q + rows
        later = (rows > 0) & (rows < num_rows) & (starts <= tile)
        row = tl.sum(later.to(tl.int32), axis=0)
        q_start = tl.load(cu_seqlens_q + row)
        q_len = tl.load(cu_seqlens_q + row + 1) - q_start
        first = (tile - (q_start // BLOCK_Q + row)) * BLOCK_Q
        count = tl.where(q_len > SHORT_Q, tl.minimum(q_len - first, BLOCK_Q), 0)
    return row, q_start, q_len, first, count


@jit
def _load_tile(
    where: tl.tensor,
    in_range: tl.tensor,
    columns: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """`[BLOCK_N, DIM]` keys or values; zero past the range and past head_dim."""
    if MASKED:
        tile = tl.load(where, mask=in_range[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif DIM != HEAD_DIM:
        tile = tl.load(where, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(where)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@jit
def _attend(
    acc: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    stride_kv: tl.tensor,
    table: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
) -> Any:
    """Continue the online softmax over the context tokens `begin … end`.

    Without MASKED every query sees all of them and their number is a multiple of BLOCK_N.
    """
    columns = tl.arange(0, DIM)
    # Block ids are loaded one tile ahead and carried: keys and values are then plain loads to
    # the compiler, which keeps as many tiles in flight as there are pipeline stages.
    ahead = begin + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):  # pyright: ignore[reportGeneralTypeIssues]
        tokens = start + tl.arange(0, BLOCK_N)
        in_range = tokens < end
        offsets = blocks.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_slot
        ahead = tokens + BLOCK_N
        blocks = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
        where = keys + offsets[:, None] + columns[None, :]
        k = _load_tile(where, in_range, columns, HEAD_DIM, DIM, MASKED, UPCAST)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            visible = in_range[None, :] & (tokens[None, :] <= positions[:, None])
            if HAS_WINDOW:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, axis=1))
        base = highest
        if MASKED:  # a query that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(weights, axis=1)
        v = _load_tile(where + stride_kv, in_range, columns, HEAD_DIM, DIM, MASKED, UPCAST)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = highest
    return acc, maximum, total


@jit_with(do_not_specialize=["num_rows", "stride_table"])
def _attention_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    cu_seqlens_q: tl.tensor,
    context_lens: tl.tensor,
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv: tl.tensor,
    stride_head: tl.tensor,
    stride_slot: tl.tensor,
    stride_table: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PEEL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    slot, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, q_start, q_len, first, count = _locate(
        cu_seqlens_q, slot, num_rows, GROUP, BLOCK_M, SHORT_Q, ROWS_PADDED, IS_SHORT
    )
    if count <= 0:
        return
    first_position = tl.load(context_lens + row) - q_len + first

    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    valid = query < count  # also excludes the rows past BLOCK_Q * GROUP: count <= BLOCK_Q
    positions = first_position + query
    columns = tl.arange(0, DIM)
    in_head = (columns < HEAD_DIM)[None, :]
    token = (q_start + first + query).to(tl.int64)
    q_where = q + (token * stride_q_token + head * stride_q_head)[:, None] + columns[None, :]
    queries = tl.load(q_where, mask=valid[:, None] & in_head, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    # The keys of this tile: [begin, end); of this split: its share, in whole tiles.
    end = first_position + count
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    if NUM_SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), NUM_SPLITS) * BLOCK_N
        begin += split * share
        end = tl.minimum(begin + share, end)

    keys = kv + kv_head.to(tl.int64) * stride_head
    table = block_tables + row.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, DIM], dtype=tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if PEEL:
        # Tiles that the first query sees whole need no mask; they are most of a long chunk.
        seen = tl.minimum(tl.maximum(first_position + 1 - begin, 0), tl.maximum(end - begin, 0))
        middle = begin + seen // BLOCK_N * BLOCK_N
        acc, maximum, total = _attend(
            acc,
            maximum,
            total,
            queries,
            positions,
            keys,
            stride_kv,
            table,
            stride_block,
            stride_slot,
            begin,
            middle,
            scale_log2,
            window,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            False,
            UPCAST,
        )
        begin = middle
    acc, maximum, total = _attend(
        acc,
        maximum,
        total,
        queries,
        positions,
        keys,
        stride_kv,
        table,
        stride_block,
        stride_slot,
        begin,
        end,
        scale_log2,
        window,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        BLOCK_N,
        HAS_WINDOW,
        True,
        UPCAST,
    )

    has_keys = total > 0
    result = acc / tl.where(has_keys, total, 1.0)[:, None]
    if NUM_SPLITS == 1:
        out_where = out + ((token * num_kv_heads * GROUP + head) * HEAD_DIM)[:, None]
        out_where += columns[None, :]
        tl.store(out_where, result, mask=valid[:, None] & in_head)
    else:
        part = ((slot.to(tl.int64) * num_kv_heads + kv_head) * NUM_SPLITS + split) * BLOCK_M + m
        lse = tl.where(has_keys, maximum + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part, lse, mask=valid)
        part_where = partial_out + (part * HEAD_DIM)[:, None] + columns[None, :]
        tl.store(part_where, result, mask=(valid & has_keys)[:, None] & in_head)


@jit_with(do_not_specialize=["num_rows"])
def _reduce_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens_q: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SHORT_Q: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    IS_SHORT: tl.constexpr,
) -> None:
    slot, kv_head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, q_start, _, first, count = _locate(
        cu_seqlens_q, slot, num_rows, GROUP, BLOCK_M, SHORT_Q, ROWS_PADDED, IS_SHORT
    )
    if m // GROUP >= count:
        return
    splits = tl.arange(0, NUM_SPLITS)
    columns = tl.arange(0, DIM)
    part = ((slot.to(tl.int64) * num_kv_heads + kv_head) * NUM_SPLITS + splits) * BLOCK_M + m
    lse = tl.load(partial_lse + part)
    has_keys = lse > float("-inf")
    highest = tl.max(lse, axis=0)
    weights = tl.where(has_keys, tl.exp2(lse - highest), 0.0)
    parts = tl.load(
        partial_out + (part * HEAD_DIM)[:, None] + columns[None, :],
        mask=has_keys[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    # The largest weight is 1: the total is below 1 only where no split has keys.
    result = tl.sum(parts * weights[:, None], axis=0) / tl.maximum(total, 1.0)
    token = (q_start + first + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    out_where = out + (token * num_kv_heads * GROUP + head) * HEAD_DIM + columns
    tl.store(out_where, result, mask=columns < HEAD_DIM)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    max_q_len: int,
    max_context_len: int,
    window: int = 0,
    tuning: Tuning | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the step's queries over one layer's cache.

    q: `[num_tokens, num_heads, head_dim]`, float32, bfloat16 or float16; all but the last
    dimension may be strided. kv: `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of q's
    dtype, keys then values, a strided view; block_size a power of two, head_dim a multiple of 16.
    block_tables: int32 `[num_rows, max_blocks]`; only the blocks of a row's context are read.
    cu_seqlens_q: int32 `[num_rows + 1]`, from 0, nondecreasing; tokens past its last entry are
    padding. context_lens: int32 `[num_rows]`, this step's tokens included; 0 for a padded row.
    max_q_len, max_context_len: upper bounds of the rows' lengths, on the host. window: how many
    tokens a query sees, itself included; 0 = all. tuning: by default `choose_tuning`'s; fixing
    its `num_splits` makes a row's result independent of the rest of the batch. workspace:
    float32, one-dimensional, for partial results; allocated when None.

    Returns a new contiguous `[num_tokens, num_heads, head_dim]` of q's dtype; a query without
    keys gives zeros, padding tokens are left unwritten.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, stride or value.
    """
    _check(q, kv, block_tables, cu_seqlens_q, context_lens)
    num_tokens, num_heads, head_dim = q.shape
    num_rows, max_blocks = block_tables.shape
    num_kv_heads, block_size = kv.shape[2:4]
    if not 0 <= max_context_len <= max_blocks * block_size:
        raise ValueError(
            f"max_context_len: {max_context_len}; expected 0 … {max_blocks * block_size},"
            " what the block tables hold"
        )
    if window < 0:
        raise ValueError(f"window: {window}; expected 0 (none) or more")
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_rows == 0:
        return out
    group = num_heads // num_kv_heads
    tuning = tuning or choose_tuning(group, head_dim, q.itemsize)
    short_q = tuning.short.block_m // group
    for tiling, is_short in ((tuning.short, True), (tuning.long, False)):
        if not is_short and max_q_len <= short_q:
            continue
        num_slots = num_rows if is_short else num_tokens // (tiling.block_m // group) + num_rows
        splits = tuning.num_splits or choose_num_splits(
            num_slots * num_kv_heads, max_context_len, _num_sms(q.device)
        )
        partial_out, partial_lse = _partials(
            workspace, q, num_slots * num_kv_heads * splits * tiling.block_m * (splits > 1)
        )
        shape: dict[str, Any] = {
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM": triton.next_power_of_2(head_dim),
            "BLOCK_M": tiling.block_m,
            "NUM_SPLITS": splits,
            "SHORT_Q": short_q,
            "ROWS_PADDED": 1 if is_short else triton.next_power_of_2(num_rows),
            "IS_SHORT": is_short,
        }
        _attention_kernel[(num_slots, num_kv_heads, splits)](
            q,
            kv,
            block_tables,
            cu_seqlens_q,
            context_lens,
            out,
            partial_out,
            partial_lse,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            kv.stride(3),
            block_tables.stride(0),
            num_rows,
            num_kv_heads,
            scale * math.log2(math.e),
            window,
            BLOCK_SIZE=block_size,
            BLOCK_N=tiling.block_n,
            HAS_WINDOW=window > 0,
            PEEL=not is_short and window == 0,
            # Triton's interpreter multiplies bfloat16 as if its bits were integers.
            UPCAST=q.device.type == "cpu",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **shape,
        )
        if splits > 1:
            _reduce_kernel[(num_slots, num_kv_heads, tiling.block_m // group * group)](
                partial_out,
                partial_lse,
                cu_seqlens_q,
                out,
                num_rows,
                num_kv_heads,
                num_warps=4,
                **shape,
            )
    return out


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    device = q.device
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOATS, device=device)
    _, num_heads, head_dim = q.shape
    if head_dim % 16:
        raise ValueError(f"q: head_dim is {head_dim}; expected a multiple of 16")
    kv_shape = (None, 2, None, None, head_dim)
    check_tensor("kv", kv, shape=kv_shape, dtypes=(q.dtype,), device=device)
    num_kv_heads, block_size = kv.shape[2:4]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"kv: {num_kv_heads} KV heads; expected a divisor of {num_heads}")
    if block_size & (block_size - 1):
        raise ValueError(f"kv: block_size is {block_size}; expected a power of two")
    ints = (torch.int32,)
    check_tensor("block_tables", block_tables, shape=(None, None), dtypes=ints, device=device)
    num_rows = block_tables.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q, shape=(num_rows + 1,), dtypes=ints, device=device)
    check_tensor("context_lens", context_lens, shape=(num_rows,), dtypes=ints, device=device)


def _num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter runs one program at a time."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _partials(
    workspace: torch.Tensor | None, q: torch.Tensor, num_partials: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for `num_partials` partial results and their log-sum-exps (float32)."""
    out_elems = num_partials * q.shape[2]
    needed = out_elems + num_partials
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    check_tensor("workspace", workspace, shape=(None,), dtypes=(torch.float32,), device=q.device)
    if workspace.numel() < needed:
        raise ValueError(f"workspace: {workspace.numel()} elements; expected at least {needed}")
    return workspace[:out_elems], workspace[out_elems:needed]
