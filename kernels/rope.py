"""Rotary position embedding, in place, with an optional RMSNorm of each head before it.

With x1, x2 the two halves of a head and cos, sin of the token's position (Su et al. 2021,
section 3.4.2, in the half-rotation layout of GPT-NeoX and Hugging Face checkpoints):

    x1' = x1 * cos - x2 * sin
    x2' = x2 * cos + x1 * sin

in float32, rounded once. The norm (Qwen3) is that of `kernels.norm` over each head, rounded to
the input's dtype before the rotation.

Grid `(num_tokens, ceil(num_heads / 8) + ceil(num_kv_heads / 8))`; one program rotates up to 8
heads of q or of k of one token. q and k may be strided views of one qkv matrix. Bytes moved a
call: `2 * num_tokens * (num_heads + num_kv_heads) * head_dim * itemsize`, and the tables' rows,
`num_tokens * head_dim * 4`.
"""

import torch
import triton
import triton.language as tl

from hillstar.kernels.checks import FLOATS, check_tensor
from hillstar.kernels.jit import jit
from hillstar.kernels.norm import rms_norm_reference


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """The specification of `rope`: same arguments, same effect."""
    cos, sin = cos_sin[positions.long(), None, :].chunk(2, dim=-1)  # [num_tokens, 1, head_dim / 2]
    for heads, weight in ((q, q_norm), (k, k_norm)):
        x = heads if weight is None else rms_norm_reference(heads, weight, eps)[0]
        x1, x2 = x.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1))


@jit
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, BLOCK_HEADS)
    columns = tl.arange(0, HALF_PADDED)
    in_half = columns < HALF

    if group < num_q_groups:
        x = q + token * stride_q_token
        stride_head = stride_q_head
        weight = q_norm
        first, limit = group * BLOCK_HEADS, num_heads
    else:
        x = k + token * stride_k_token
        stride_head = stride_k_head
        weight = k_norm
        first, limit = (group - num_q_groups) * BLOCK_HEADS, num_kv_heads

    heads = first + tl.arange(0, BLOCK_HEADS)
    mask = (heads < limit)[:, None] & in_half[None, :]
    where1 = x + heads[:, None] * stride_head + columns[None, :]
    x1 = tl.load(where1, mask=mask, other=0.0)
    x2 = tl.load(where1 + HALF, mask=mask, other=0.0)
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if HAS_NORM:
        square = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
        scale = (1.0 / tl.sqrt(square / (2 * HALF) + eps))[:, None]
        w1 = tl.load(weight + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(weight + HALF + columns, mask=in_half, other=0.0).to(tl.float32)[None, :]
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)

    row = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(row + columns, mask=in_half, other=0.0)[None, :]
    sin = tl.load(row + HALF + columns, mask=in_half, other=0.0)[None, :]
    tl.store(where1, x1 * cos - x2 * sin, mask=mask)
    tl.store(where1 + HALF, x2 * cos + x1 * sin, mask=mask)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q and k by their tokens' positions, in place.

    q: `[num_tokens, num_heads, head_dim]`, k: `[num_tokens, num_kv_heads, head_dim]`, of one
    dtype (float32, bfloat16, float16), all but the last dimension may be strided. positions:
    int32 or int64 `[num_tokens]`, each below max_pos (not checked: it is on the device).
    cos_sin: float32 `[max_pos, head_dim]`, contiguous: the cosines, then the sines.
    q_norm, k_norm: `[head_dim]` of q's dtype, both or neither: RMSNorm weights applied first.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride.
    """
    device = q.device
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOATS, device=device)
    num_tokens, num_heads, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q: head_dim is {head_dim}; expected an even number")
    check_tensor("k", k, shape=(num_tokens, None, head_dim), dtypes=(q.dtype,), device=device)
    check_tensor(
        "positions",
        positions,
        shape=(num_tokens,),
        dtypes=(torch.int32, torch.int64),
        device=device,
    )
    check_tensor(
        "cos_sin",
        cos_sin,
        shape=(None, head_dim),
        dtypes=(torch.float32,),
        device=device,
        contiguous=True,
    )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm: given without k_norm or the reverse; expected both or neither")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            check_tensor(name, weight, shape=(head_dim,), dtypes=(q.dtype,), device=device)
    if num_tokens == 0:
        return
    block_heads = 8
    groups = triton.cdiv(num_heads, block_heads) + triton.cdiv(k.shape[1], block_heads)
    _rope_kernel[(num_tokens, groups)](
        q,
        k,
        positions,
        cos_sin,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        num_heads,
        k.shape[1],
        eps,
        HAS_NORM=q_norm is not None,
        HALF=head_dim // 2,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block_heads,
        num_warps=2,
    )
