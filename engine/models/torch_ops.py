"""The forward pass's operations in plain torch: the CPU's own fast path.

At a few tokens a step, a layer's matrices take most of the time and torch's fixed cost of a call
most of the rest; both were measured (2 Sapphire Rapids cores, bf16, torch 2.13, 2026-11-29).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from hillstar.engine.attention import PagedAttention
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.ops import Attend, Head, HeadNorms, Read, Write
from hillstar.engine.models.rope import rope_table
from hillstar.engine.models.weights import Matrix
from hillstar.engine.plan import Batch

_MAX_COLUMNS = 256
"""Up to this many tokens, `weight @ x.T` beats `linear`: it multiplies the weights as they lie in
memory instead of reordering them at each call. Beyond it they are about equal."""

_MAX_Q4_TOKENS = 8
"""Up to this many tokens, 4-bit weights are multiplied: 5.6 ms against 17 at one token, 9 against
17 at four, 16 against 17 at eight, 34 against 28 at sixteen (30 layers of 3.5 M weights,
2026-11-29)."""

_MAX_NEAR = 1024  # logits computed twice, at most, for one token

Product = Callable[[torch.Tensor], torch.Tensor]

Mix = Callable[[int, torch.Tensor], torch.Tensor]
"""A layer's attention of one step: stores keys and values of `qkv` first, queries and keys of which
are rotated."""


class TorchOps:
    """`Ops` on the CPU. Holds the rotation table, in the model's dtype.

    The residual stream is float32: a sum of dozens of terms in bfloat16 loses more than all
    products together, and here it costs next to nothing.
    """

    residual_dtype = torch.float32

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, max_position: int) -> None:
        self._config = config
        cos, sin = rope_table(config.rope, config.head_dim, max_position).chunk(2, dim=1)
        # x * cos + roll(x, half) * sin rotates both halves at once with the first sine negated.
        self._cos = torch.cat((cos, cos), dim=1).to(dtype)
        self._sin = torch.cat((-sin, sin), dim=1).to(dtype)

    def read(self, norm: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> Read:
        return self._read(norm, self._product(weight, bias))

    def read_glu(self, norm: torch.Tensor, gate_up: Matrix) -> Read:
        multiply = self._product(gate_up)
        return self._read(norm, lambda x: self._glu(multiply(x)))

    def write(self, weight: Matrix) -> Write:
        multiply = self._product(weight)

        def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            # Faster than in place where the product is transposed.
            return residual + multiply(x)

        return add

    def head(self, norm: torch.Tensor, weight: torch.Tensor) -> Head:
        normed = self._norm(norm)
        multiply = _head(weight, self._product(Matrix(weight)))
        return lambda residual: multiply(normed(residual))

    def _read(self, norm: torch.Tensor, product: Product) -> Read:
        normed = self._norm(norm)
        return lambda residual: product(normed(residual))

    def attention(self, cache: KVCache) -> Callable[[Batch], Attend]:
        """Attention over a cache; called with a batch, it prepares what the layers of a step
        share: positions, slots, block tables."""
        prepare_step = self._paged(cache)

        def prepare(batch: Batch) -> Attend:
            positions = torch.from_numpy(batch.positions)
            cos = self._cos.index_select(0, positions).unsqueeze(1)
            sin = self._sin.index_select(0, positions).unsqueeze(1)
            step = prepare_step(batch)

            def attend(layer: int, qkv: torch.Tensor, head_norms: HeadNorms | None) -> torch.Tensor:
                self._rotate(qkv, cos, sin, head_norms)
                return step(layer, qkv)

            return attend

        return prepare

    # What a way of computing may do otherwise (fixed_torch_ops).

    def _norm(self, weight: torch.Tensor) -> Product:
        return _norm(weight, self._config.rms_norm_eps)

    def _product(self, weight: Matrix, bias: torch.Tensor | None = None) -> Product:
        return _product(weight, bias)

    def _glu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> None:
        """Norm and rotate queries and keys, in place. cos, sin: `[T, 1, head_dim]`."""
        config = self._config
        rotated = qkv[:, : config.num_heads + config.num_kv_heads]
        if norms is not None:
            self._norm_heads(rotated, norms)
        swapped = rotated.roll(config.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(swapped, sin)

    def _paged(self, cache: KVCache) -> Callable[[Batch], Mix]:
        config = self._config
        return PagedAttention(cache, config.num_heads, config.sliding_window).step

    def _norm_heads(self, heads: torch.Tensor, norms: HeadNorms) -> None:
        num_heads = self._config.num_heads
        for part, weight in ((heads[:, :num_heads], norms.q), (heads[:, num_heads:], norms.k)):
            part.copy_(F.rms_norm(part, weight.shape, weight, self._config.rms_norm_eps))


def _product(weight: Matrix, bias: torch.Tensor | None = None) -> Product:
    """x @ weight.T, plus the bias if there is one."""
    wide = _linear(weight.values) if bias is None else _affine(weight.values, bias)
    q4 = weight.q4
    if q4 is None:
        return wide

    def apply(x: torch.Tensor) -> torch.Tensor:
        if len(x) > _MAX_Q4_TOKENS:
            return wide(x)
        product = q4.multiply(x)
        return product if bias is None else product.add_(bias)

    return apply


def _linear(weight: torch.Tensor) -> Product:
    def apply(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return torch.mv(weight, x[0]).unsqueeze(0)
        if len(x) <= _MAX_COLUMNS:
            return torch.mm(weight, x.t()).t()
        return F.linear(x, weight)

    return apply


def _affine(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    column = bias.unsqueeze(1)

    def apply(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return torch.addmv(bias, weight, x[0]).unsqueeze(0)
        if len(x) <= _MAX_COLUMNS:
            return torch.addmm(column, weight, x.t()).t()
        return F.linear(x, weight, bias)

    return apply


def _head(weight: torch.Tensor, multiply: Product) -> Product:
    """Products come back in the weights' dtype: in bfloat16, dozens of tokens may share the best
    logit. Every token that rounding may have kept from being the best is computed once more."""
    if weight.dtype == torch.float32:
        return lambda x: multiply(x).contiguous()
    # The best may have been rounded down and another up, each by half a unit in the last place.
    margin = 2 * torch.finfo(weight.dtype).eps

    def apply(x: torch.Tensor) -> torch.Tensor:
        logits = multiply(x).to(torch.float32, memory_format=torch.contiguous_format)
        for row, hidden in zip(logits.numpy(), x.float(), strict=True):
            best = row.max()
            near = np.flatnonzero(row >= best - margin * abs(best))
            if len(near) < _MAX_NEAR:  # else all are alike: a row of NaN, or of zeros
                row[near] = torch.mv(weight[torch.from_numpy(near)].float(), hidden).numpy()
        return logits

    return apply


def _norm(weight: torch.Tensor, eps: float) -> Product:
    """RMSNorm in four passes, as torch has no fused one on a CPU: with n inputs it is
    x / hypot(|x|, sqrt(n * eps)) * sqrt(n) * weight. At a few tokens each runs on one thread, and
    waking a second one costs more than all four."""
    size, dtype = len(weight), weight.dtype
    scale = weight.float() * math.sqrt(size)
    floor = torch.tensor(math.sqrt(size * eps))

    def apply(x: torch.Tensor) -> torch.Tensor:
        lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(floor)
        return torch.mul(x / lengths, scale, out=torch.empty(x.shape, dtype=dtype))

    return apply
