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
their base-2 log-sum-exp in memory. Weighing them together is little work for a short row: the
last of its programs to arrive does it, always in the order of the splits. A long tile has many
rows: `reduce_kernel`, grid `(slots, num_kv_heads, BLOCK_Q)`, takes a query each. A row's result
depends on its own lengths, the tiling and `num_splits`, not on its neighbours.

Launched while the kernel before still runs, where the device can (`kernels/pdl.py`): the lengths
and the block tables are read before the wait. So is the first tile, as far as the L2 cache: that
is no read of memory by the program, and what the kernel before writes there is read after it.

Layout: kv is one layer's view `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of the pool;
block offsets are 64 bits wide. Bytes moved a call:
`2 * num_kv_heads * head_dim * itemsize * sum(context)` (times the row's tiles when prefilling),
and q and out once.
"""

import math
from typing import Any

import torch
import triton

from hillstar.kernels.attention_merge import reduce_kernel
from hillstar.kernels.attention_tile import attention_kernel
from hillstar.kernels.attention_tuning import (
    Tiling,
    Tuning,
    choose_num_splits,
    choose_tuning,
)
from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.pdl import has_pdl

_MERGED_ELEMENTS = 8192  # of partial results in flight, in a program that puts splits together


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
    counters: torch.Tensor | None = None,
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
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the step's queries over one layer's cache.

    q: `[num_tokens, num_heads, head_dim]`, float32, bfloat16 or float16; all but the last
    dimension may be strided. kv: `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of q's
    dtype, keys then values, a strided view; block_size a power of two, head_dim a multiple of 16.
    block_tables: int32 `[num_rows, max_blocks]`; only the blocks of a row's context are read.
    cu_seqlens_q: int32 `[num_rows + 1]`, from 0, nondecreasing; tokens past its last entry are
    padding. context_lens: int32 `[num_rows]`, this step's tokens included; 0 for a padded row.
    max_q_len, max_context_len: upper bounds of the rows' lengths, on the host. window: how many
    tokens a query sees, itself included; 0 = all. tuning: by default `choose_tuning`'s; with
    `fixed_tuning`'s a token's result is the same bits in any batch and any chunk. counters: int32,
    zeros, one for each short row and KV head of a split launch; left zero, so that one tensor
    serves all calls of a stream. Without it a split launch makes its own.

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
    for is_short in (True, False):
        if is_short or max_q_len > tuning.short.block_m // group:
            _launch(
                q,
                kv,
                block_tables,
                cu_seqlens_q,
                context_lens,
                out,
                counters,
                tuning,
                is_short=is_short,
                scale=scale,
                max_q_len=max_q_len,
                max_context_len=max_context_len,
                window=window,
            )
    return out


def _launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    tuning: Tuning,
    *,
    is_short: bool,
    scale: float,
    max_q_len: int,
    max_context_len: int,
    window: int,
) -> None:
    """Fill the short or the long rows of `out`."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = len(block_tables), kv.shape[2]
    group = num_heads // num_kv_heads
    tiling = tuning.short if is_short else tuning.long
    block_q = tiling.block_m // group
    num_slots = num_rows if is_short else num_tokens // block_q + num_rows
    num_tiles = num_slots * num_kv_heads
    is_fixed = tuning.split_tokens is not None
    splits = _num_splits(tuning, tiling, num_tiles, max_context_len, q.device)
    part_m = tiling.block_m
    if is_fixed and is_short:  # far from full, where each row has one query
        part_m = min(part_m, triton.next_power_of_2(max_q_len * group))
    partial_out = partial_lse = None
    if splits > 1:
        parts = (num_tiles, splits, part_m)
        partial_out = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    merges = is_short and splits > 1
    if merges:
        counters = _counters(counters, num_tiles, q.device)
    pdl = has_pdl(q.device)
    dim, heads = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    shape: dict[str, Any] = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "DIM": dim,
        "HEADS": heads,
        "BLOCK_M": tiling.block_m,
        "PART_M": part_m,
        "NUM_SPLITS": splits,
        "AT_ONCE": 1 if is_fixed else max(1, min(splits, _MERGED_ELEMENTS // (heads * dim))),
        "SHORT_Q": tuning.short.block_m // group,
        "ROWS_PADDED": 1 if is_short else triton.next_power_of_2(num_rows),
        "IS_SHORT": is_short,
        "PDL": pdl,
        "launch_pdl": pdl,
        # Whether a product and a sum are one operation is the compiler's choice otherwise.
        "enable_fp_fusion": not is_fixed,
    }
    attention_kernel[(num_slots, num_kv_heads, splits)](
        q,
        kv,
        block_tables,
        cu_seqlens_q,
        context_lens,
        out,
        partial_out,
        partial_lse,
        counters if merges else None,
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
        BLOCK_SIZE=kv.shape[3],
        BLOCK_N=tiling.block_n,
        SPLIT_TOKENS=tuning.split_tokens or 0,
        MERGES=merges,
        HAS_WINDOW=window > 0,
        PEEL=not is_short and window == 0 and not is_fixed,
        PREFETCH=head_dim * q.itemsize if pdl and is_short and _is_aligned(kv) else 0,
        # Triton's interpreter multiplies bfloat16 as if its bits were integers.
        UPCAST=q.device.type == "cpu",
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **shape,
    )
    if splits > 1 and not merges:
        reduce_kernel[(num_slots, num_kv_heads, block_q)](
            partial_out,
            partial_lse,
            cu_seqlens_q,
            out,
            num_rows,
            num_kv_heads,
            num_warps=4,
            **shape,
        )


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


def _num_splits(
    tuning: Tuning, tiling: Tiling, num_tiles: int, max_context_len: int, device: torch.device
) -> int:
    if tuning.split_tokens is not None:
        # A power of two, lest each context be compiled; empty splits change nothing.
        return 1 << max(0, -(-max_context_len // tuning.split_tokens) - 1).bit_length()
    return tuning.num_splits or choose_num_splits(
        num_tiles, max_context_len, tiling.block_n, _num_sms(device)
    )


def _num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; the interpreter runs one program at a time."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _counters(counters: torch.Tensor | None, num_tiles: int, device: torch.device) -> torch.Tensor:
    if counters is None:
        return torch.zeros(num_tiles, dtype=torch.int32, device=device)
    check_tensor("counters", counters, shape=(None,), dtypes=(torch.int32,), device=device)
    if counters.numel() < num_tiles:
        raise ValueError(f"counters: {counters.numel()} elements; expected at least {num_tiles}")
    return counters


def _is_aligned(kv: torch.Tensor) -> bool:
    """Whether the vectors of the cache begin at multiples of 16 bytes."""
    places = (kv.data_ptr(), *(stride * kv.itemsize for stride in kv.stride()[:-1]))
    return all(place % 16 == 0 for place in places)
