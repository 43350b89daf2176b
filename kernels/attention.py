"""Attention over the paged KV cache, for any mix of prefill chunks and decode rows in one call.

A *row* is one sequence's share of the step: `q_len` new query tokens at the end of `context`
tokens, whose keys and values are all in the cache already. Query at position p sees the keys at
positions `max(0, p - window + 1) … p` (window 0: from 0). Softmax is computed online over tiles
of the context (Dao 2023, "FlashAttention-2", algorithm 1) in float32; base-2 exponentials.

Packing. The query heads that share a KV head times the query tokens form the M side of the
products: row m of a tile is query token `m // group`, head `m % group`, so a key is read once for
all heads that need it. Decode fills few of a tile's rows: it waits for memory, not for products.

Two launches, whose grids depend on shapes and host bounds alone (so CUDA graphs may hold them)
and whose programs share out the work by the lengths they find on the device:

* *Short* rows, all of whose queries fit one tile (decode, drafts): two programs an SM walk equal
  shares of all that is to be read, from row to row and KV head to KV head (Osama et al. 2023,
  "Stream-K"), however uneven the contexts are.
* *Long* rows (prefill chunks), left out if `max_q_len` excludes them: a program takes one tile of
  one KV head; the last tiles of a row, which see the most keys, begin first. Where tiles are
  fewer than programs fit the device, several share a tile's context.

A context that several programs read (Dao et al. 2023, "Flash-Decoding") leaves normalised partial
results and their base-2 log-sum-exp in memory. Weighing them together, always in their order, is
little work for a short row: the last of its programs to arrive does it. A long tile has many
rows: `reduce_kernel`, grid `(tiles, num_kv_heads, queries of a tile)`, takes a query each.

How a context is cut depends on the whole batch, and so do a result's last bits. A fixed tuning
cuts every context at multiples of its `split_tokens` instead, whatever else is computed: parts
are of unequal length then, and more of them are weighed.

Launched while the kernel before still runs, where the device can (`kernels/pdl.py`): the lengths
are read before the wait.

Layout: kv is one layer's view `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of the pool;
block offsets are 64 bits wide. Bytes moved a call:
`2 * num_kv_heads * head_dim * itemsize * sum(context)` (times the row's tiles when prefilling),
and q and out once.
"""

import math

import torch
import triton

from hillstar.kernels.attention_launch import Launch, launch_long, launch_short
from hillstar.kernels.attention_tuning import Tuning, choose_tuning
from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.pdl import has_pdl


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
    scale: positive. max_q_len, max_context_len: upper bounds of the rows' lengths, on the host.
    window: how many tokens a query sees, itself included; 0 = all. tuning: by default
    `choose_tuning`'s; with `fixed_tuning`'s a token's result is the same bits in any batch and any
    chunk, and takes the memory of `max_context_len // split_tokens` float32 results. counters:
    int32, zeros, one for each short row and KV head, or for each program where the tuning is not
    fixed; left zero, so that one tensor serves all calls of a stream. Without it a call makes its
    own.

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
    if scale <= 0:
        raise ValueError(f"scale: {scale}; expected a positive number")
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_rows == 0:
        return out
    group = num_heads // num_kv_heads
    tuning = tuning or choose_tuning(group, head_dim, q.itemsize)
    split_tokens = tuning.split_tokens or 0
    assert split_tokens % block_size == 0, (split_tokens, block_size)
    pdl = has_pdl(q.device)
    launch = Launch(
        inputs=(q, kv, block_tables, cu_seqlens_q, context_lens, out),
        scalars=(
            *(q.stride(0), q.stride(1), *kv.stride()[:-1], block_tables.stride(0)),
            *(num_rows, num_kv_heads, scale * math.log2(math.e), window),
        ),
        options={
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "DIM": triton.next_power_of_2(head_dim),
            "SHORT_Q": tuning.short.block_m // group,
            "ROWS_PADDED": max(16, triton.next_power_of_2(num_rows)),
            "HAS_WINDOW": window > 0,
            "PDL": pdl,
            "launch_pdl": pdl,
            # Whether a product and a sum are one operation is the compiler's choice otherwise.
            "enable_fp_fusion": not split_tokens,
        },
        reads={
            "BLOCK_SIZE": block_size,
            # Triton's interpreter multiplies bfloat16 as if its bits were integers.
            "UPCAST": q.device.type == "cpu",
        },
    )
    launch_short(launch, tuning.short, counters, max_q_len, max_context_len, split_tokens)
    if max_q_len > tuning.short.block_m // group:
        launch_long(launch, tuning.long, max_context_len, split_tokens)
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
