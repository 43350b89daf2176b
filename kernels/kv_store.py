"""Writing the KV cache: this step's keys and values into their slots, and whole blocks copied.

`store_kv`: grid `(num_tokens, 2)`; one program writes all heads of one token's key (or value).
A *slot* is `block * block_size + offset`; a negative slot is skipped, so a padded row of a CUDA
graph writes nothing. Bytes moved a call:
`4 * num_tokens * num_kv_heads * head_dim * itemsize` (a read and a write of K and of V).

`copy_blocks`: grid `(num_pairs, ceil(block_bytes / 64 KiB))`; one program moves 64 KiB of a
block as 8-byte words where the block's size allows, else as bytes. Bytes moved a call:
`2 * num_pairs * block_bytes`.

Offsets are 64 bits wide: block times stride passes 2^31 elements in a pool of a few GiB.
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The specification of `store_kv`: same arguments, same effect."""
    block_size = kv.shape[3]
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    kv[slots // block_size, 0, :, slots % block_size] = k[stored]
    kv[slots // block_size, 1, :, slots % block_size] = v[stored]


def copy_blocks_reference(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """The specification of `copy_blocks`: same arguments, same effect."""
    pool[pairs[:, 1]] = pool[pairs[:, 0]]


@jit
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    slot_mapping: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv: tl.tensor,
    stride_head: tl.tensor,
    stride_slot: tl.tensor,
    num_kv_heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    is_value = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    columns = tl.arange(0, DIM_PADDED)[None, :]
    mask = (heads < num_kv_heads) & (columns < HEAD_DIM)
    if is_value == 0:
        source = k + token * stride_k_token + heads * stride_k_head + columns
    else:
        source = v + token * stride_v_token + heads * stride_v_head + columns
    target = kv + (slot // BLOCK_SIZE) * stride_block + is_value * stride_kv
    target += (slot % BLOCK_SIZE) * stride_slot + heads * stride_head + columns
    tl.store(target, tl.load(source, mask=mask), mask=mask)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Scatter this step's keys and values into one layer's cache.

    k, v: `[num_tokens, num_kv_heads, head_dim]`, all but the last dimension may be strided.
    kv: `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of the same dtype (float32,
    bfloat16, float16), a strided view of the pool; block_size is a power of two. slot_mapping:
    int64 `[num_tokens]`, distinct slots below num_blocks * block_size (not checked: they are on
    the device), or negative to skip the token.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device = kv.device
    check_tensor("kv", kv, shape=(None, 2, None, None, None), dtypes=FLOATS, device=device)
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    if block_size & (block_size - 1):
        raise ValueError(f"kv: block_size is {block_size}; expected a power of two")
    shape = (None, num_kv_heads, head_dim)
    check_tensor("k", k, shape=shape, dtypes=(kv.dtype,), device=device)
    check_tensor("v", v, shape=k.shape, dtypes=(kv.dtype,), device=device)
    num_tokens = k.shape[0]
    check_tensor(
        "slot_mapping", slot_mapping, shape=(num_tokens,), dtypes=(torch.int64,), device=device
    )
    if num_tokens == 0:
        return
    heads_padded = triton.next_power_of_2(num_kv_heads)
    dim_padded = triton.next_power_of_2(head_dim)
    _store_kv_kernel[(num_tokens, 2)](
        k,
        v,
        kv,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HEADS_PADDED=heads_padded,
        DIM_PADDED=dim_padded,
        num_warps=max(1, min(8, heads_padded * dim_padded // 256)),
    )


@jit
def _copy_blocks_kernel(
    pool: tl.tensor,
    pairs: tl.tensor,
    stride: tl.tensor,
    num_words: tl.tensor,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    pair = tl.program_id(0).to(tl.int64)
    source = pool + tl.load(pairs + 2 * pair) * stride
    target = pool + tl.load(pairs + 2 * pair + 1) * stride
    first = tl.program_id(1) * (NUM_TILES * TILE)
    for tile in range(NUM_TILES):
        words = first + tile * TILE + tl.arange(0, TILE)
        mask = words < num_words
        tl.store(target + words, tl.load(source + words, mask=mask), mask=mask)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks inside the pool: `pool[destination] = pool[source]` for each pair.

    pool: `[num_blocks, block_elems]`, any dtype, rows contiguous. pairs: int64 `[num_pairs, 2]`,
    contiguous: (source, destination), on the pool's device. Pairs are independent: no
    destination is the source or destination of another pair (not checked).

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device = pool.device
    check_tensor("pool", pool, shape=(None, None), dtypes=(pool.dtype,), device=device)
    check_tensor(
        "pairs", pairs, shape=(None, 2), dtypes=(torch.int64,), device=device, contiguous=True
    )
    if pairs.shape[0] == 0 or pool.numel() == 0:
        return
    sizes = (pool.shape[1] * pool.itemsize, pool.stride(0) * pool.itemsize, pool.data_ptr())
    whole_words = all(size % 8 == 0 for size in sizes)
    words = pool.view(torch.int64 if whole_words else torch.uint8)
    num_words = words.shape[1]
    tile = 1024
    num_tiles = 8 if whole_words else 64  # 64 KiB a program
    grid = (pairs.shape[0], triton.cdiv(num_words, tile * num_tiles))
    _copy_blocks_kernel[grid](
        words, pairs, words.stride(0), num_words, NUM_TILES=num_tiles, TILE=tile, num_warps=4
    )
