"""Rotary position embedding of a step's queries and keys; keys and values into the KV cache.

With x1, x2 the two halves of a head and cos, sin of the token's position (Su et al. 2021,
section 3.4.2, in the half-rotation layout of GPT-NeoX and Hugging Face checkpoints):

    x1' = x1 * cos - x2 * sin
    x2' = x2 * cos + x1 * sin

in float32, rounded once. The optional norm before it (Qwen3) is that of `kernels.norm` over each
head, rounded to the input's dtype before the rotation. Queries are rotated where they are, keys
on their way into the cache, values go there as they are.

A *slot* is `block * block_size + offset`; a negative slot is skipped, so a padded row of a CUDA
graph writes nothing. Offsets are 64 bits wide: block times stride passes 2^31 elements in a pool
of a few GiB.

Grid `(num_tokens, ceil(num_heads / 8) + 2 * ceil(num_kv_heads / 8))`; one program takes up to 8
heads of q, k or v of one token; they may be strided views of one qkv matrix. Bytes moved a call:
`2 * num_tokens * (num_heads + 2 * num_kv_heads) * head_dim * itemsize`, and the tables' rows,
`num_tokens * head_dim * 4`. Launched while the kernel before still runs, where the device can
(`kernels/pdl.py`): positions, slots, the tables and the norms' weights are read before the wait.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.norm import rms_norm_reference
from hillstar.kernels.pdl import has_pdl

_BLOCK_HEADS = 8  # of a program


def rope_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The specification of `rope_store`: same arguments, same effect."""
    cos, sin = cos_sin[positions.long(), None, :].chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]

    def rotated(heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = heads if weight is None else rms_norm_reference(heads, weight, eps)
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(heads.dtype)

    q.copy_(rotated(q, q_norm))
    block_size = kv.shape[3]
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, 0, :, offsets] = rotated(k, k_norm)[is_stored]
    kv[blocks, 1, :, offsets] = v[is_stored]


@jit
def _normed(
    x1: tl.tensor, x2: tl.tensor, w1: tl.tensor, w2: tl.tensor, eps: tl.tensor, HALF: tl.constexpr
) -> Any:
    """RMSNorm of heads in two halves, rounded to their dtype."""
    first, second = x1.to(tl.float32), x2.to(tl.float32)
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
    first = (first * scale).to(x1.dtype).to(tl.float32) * w1.to(tl.float32)
    second = (second * scale).to(x1.dtype).to(tl.float32) * w2.to(tl.float32)
    return first.to(x1.dtype), second.to(x1.dtype)


@jit
def _rope_store_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_block: tl.tensor,
    stride_kv: tl.tensor,
    stride_head: tl.tensor,
    stride_slot: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    group = tl.program_id(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    columns = tl.arange(0, HALF_PADDED)[None, :]
    in_half = columns < HALF
    row = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + columns
    cos = tl.load(row, mask=in_half, other=0.0)
    sin = tl.load(row + HALF, mask=in_half, other=0.0)

    # Where each half of a head comes from and goes to, and the norm of the heads.
    weight = q_norm
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    if group < Q_GROUPS:
        heads += group * BLOCK_HEADS
        mask = heads < NUM_HEADS
        source = q + token * stride_q_token + heads * stride_q_head
        target = source
    else:
        part = group - Q_GROUPS
        is_value = part >= KV_GROUPS
        heads += (part % KV_GROUPS) * BLOCK_HEADS
        mask = heads < tl.where(slot >= 0, NUM_KV_HEADS, 0)
        target = kv + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
        target += heads * stride_head
        if is_value:
            source = v + token * stride_v_token + heads * stride_v_head
            target += stride_kv
        else:
            source = k + token * stride_k_token + heads * stride_k_head
            if HAS_NORM:
                weight = k_norm
    mask = mask & in_half
    w1 = tl.load(weight + columns, mask=in_half, other=0.0) if HAS_NORM else cos
    w2 = tl.load(weight + HALF + columns, mask=in_half, other=0.0) if HAS_NORM else sin
    if PDL:
        gdc_wait()
    x1 = tl.load(source + columns, mask=mask, other=0.0)
    x2 = tl.load(source + HALF + columns, mask=mask, other=0.0)
    if group < Q_GROUPS + KV_GROUPS:
        if HAS_NORM:
            x1, x2 = _normed(x1, x2, w1, w2, eps, HALF)
        y1 = x1.to(tl.float32) * cos - x2.to(tl.float32) * sin
        y2 = x2.to(tl.float32) * cos + x1.to(tl.float32) * sin
        x1, x2 = y1.to(x1.dtype), y2.to(x2.dtype)
    tl.store(target + columns, x1, mask=mask)
    tl.store(target + HALF + columns, x2, mask=mask)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q in place by its tokens' positions; scatter rotated keys, and values, to `kv`.

    q: `[num_tokens, num_heads, head_dim]`, k and v: `[num_tokens, num_kv_heads, head_dim]`; all
    but the last dimension may be strided. k and v are left unchanged. kv: one layer's cache,
    `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, a strided view of the pool; block_size
    is a power of two. All of one dtype: float32, bfloat16 or float16.
    positions: int32 or int64 `[num_tokens]`, each below max_pos. slot_mapping: int32 or int64
    `[num_tokens]`, distinct slots below num_blocks * block_size, or negative to store nothing of
    the token. (Neither's values are checked: they are on the device.)
    cos_sin: float32 `[max_pos, head_dim]`, contiguous: the cosines, then the sines.
    q_norm, k_norm: `[head_dim]` of q's dtype, both or neither: RMSNorm weights applied first.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    _check(q, k, v, kv, positions, slot_mapping, cos_sin)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm: given without k_norm or the reverse; expected both or neither")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, shape=(head_dim,), dtypes=(q.dtype,), device=q.device)
    if num_tokens == 0:
        return
    groups = triton.cdiv(num_heads, _BLOCK_HEADS) + 2 * triton.cdiv(num_kv_heads, _BLOCK_HEADS)
    pdl = has_pdl(q.device)
    _rope_store_kernel[(num_tokens, groups)](
        q,
        k,
        v,
        kv,
        positions,
        slot_mapping,
        cos_sin,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        eps,
        HAS_NORM=q_norm is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=kv.shape[3],
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=_BLOCK_HEADS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=2,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    device, dtypes = q.device, (q.dtype,)
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOATS, device=device)
    num_tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q: head_dim is {head_dim}; expected an even number")
    check_tensor("kv", kv, shape=(None, 2, None, None, head_dim), dtypes=dtypes, device=device)
    num_kv_heads, block_size = kv.shape[2:4]
    if block_size & (block_size - 1):
        raise ValueError(f"kv: block_size is {block_size}; expected a power of two")
    for name, x in (("k", k), ("v", v)):
        shape = (num_tokens, num_kv_heads, head_dim)
        check_tensor(name, x, shape=shape, dtypes=dtypes, device=device)
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        ints = (torch.int32, torch.int64)
        check_tensor(name, x, shape=(num_tokens,), dtypes=ints, device=device)
    check_tensor(
        "cos_sin",
        cos_sin,
        shape=(None, head_dim),
        dtypes=(torch.float32,),
        device=device,
        contiguous=True,
    )
