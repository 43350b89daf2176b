"""`gate_up_swiglu` of many tokens on the tensor cores, for `kernels/linear.py`.

    out = silu(g) * u,  (g | u) = x W^T     (Shazeer 2020, section 2)

The product alone is not faster than cuBLAS's; what is saved is that g and u never go through
memory.

Grid `ceil(num_tokens / BLOCK_M) * ceil(num_outputs / BLOCK_N)`, in groups of 8 tiles of weights by
all tiles of tokens, so that programs that run at once share weights and tokens in the L2 cache.
One program multiplies BLOCK_M tokens by BLOCK_N rows of each half of the weights, brought in by
tensor descriptors, which read zeros past an end and do not write there. Bytes moved a call: the
weights once from memory (and once a tile of tokens from the cache), the tokens, the result.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from hillstar.kernels.jit import jit_with
from hillstar.kernels.linear_tuning import DenseTuning
from hillstar.kernels.pdl import has_pdl


@jit_with(do_not_specialize=["num_tokens"])
def _dense_glu_kernel(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    out: tl.tensor_descriptor,
    num_tokens: tl.tensor,
    num_outputs: tl.tensor,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    num_m, num_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_outputs, BLOCK_N)
    group, place = tl.program_id(0) // (8 * num_m), tl.program_id(0) % (8 * num_m)
    size = tl.minimum(num_n - group * 8, 8)
    token = place // size * BLOCK_M
    output = (group * 8 + place % size) * BLOCK_N
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        tokens = x.load([token, k])
        gates = weight.load([output, k])
        ups = weight.load([num_outputs + output, k])
        if UPCAST:
            tokens, gates, ups = tokens.to(tl.float32), gates.to(tl.float32), ups.to(tl.float32)
        gate = tl.dot(tokens, gates.T, gate)
        up = tl.dot(tokens, ups.T, up)
    product = gate / (1.0 + tl.exp(-gate)) * up
    out.store([token, output], product.to(out.dtype))


def dense_glu(x: torch.Tensor, weight: torch.Tensor, tuning: DenseTuning) -> torch.Tensor:
    """`silu(gate) * up` of `x @ weight.T`, new and contiguous `[num_tokens, intermediate]`.

    For arguments that `gate_up_swiglu` has checked and tensor descriptors can describe.
    """
    num_tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    block_m, block_n, block_k = tuning.block_m, tuning.block_n, tuning.block_k
    pdl = has_pdl(x.device)
    grid = (triton.cdiv(num_tokens, block_m) * triton.cdiv(num_outputs, block_n),)
    _dense_glu_kernel[grid](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        TensorDescriptor.from_tensor(out, [block_m, block_n]),
        num_tokens,
        num_outputs,
        K=num_inputs,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NUM_STAGES=tuning.num_stages,
        PDL=pdl,
        UPCAST=not x.is_cuda,  # the interpreter has no product of bfloat16
        num_warps=tuning.num_warps,
        launch_pdl=pdl,
    )
    return out


def can_describe(*matrices: torch.Tensor) -> bool:
    """Whether tensor descriptors fit: 2-byte elements, rows that begin on 16-byte boundaries."""
    return all(
        m.itemsize == 2 and m.data_ptr() % 16 == 0 and m.stride(0) * m.itemsize % 16 == 0
        for m in matrices
    )
