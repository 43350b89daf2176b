"""The CPU's operations where a token's result must not depend on what is computed beside it.

A library sums in an order that follows the shape of a call and how it is shared among threads, and
computes what is left over of a vector otherwise. So no call has a shape that follows the batch:
norms and products take 16 tokens, padded with zeros (one costs what 16 do: the weights are read
once); functions of elements take so few rows that torch does not share them out; attention takes
each query on its own (`engine.fixed_attention`).
"""

from collections.abc import Callable

import torch

from hillstar.engine.fixed_attention import FixedAttention
from hillstar.engine.kv.cache import KVCache
from hillstar.engine.models.ops import HeadNorms
from hillstar.engine.models.torch_ops import Mix, Product, TorchOps
from hillstar.engine.models.weights import Matrix
from hillstar.engine.plan import Batch

_NUM_TOKENS = 16  # of a norm or product
_MAX_ELEMENTS = 32768  # that torch leaves to one thread (at::internal::GRAIN_SIZE)


class FixedTorchOps(TorchOps):
    """`TorchOps` in calls of fixed shapes, and by weights of one form."""

    def _norm(self, weight: torch.Tensor) -> Product:
        return _in_blocks(super()._norm(weight))

    def _product(self, weight: Matrix, bias: torch.Tensor | None = None) -> Product:
        matrix = weight.values
        multiply = _in_blocks(lambda block: torch.mm(matrix, block.t()).t())
        return multiply if bias is None else lambda x: multiply(x).add_(bias)

    def _glu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows = max(1, _MAX_ELEMENTS // gate_up.shape[1])
        parts = range(0, max(1, len(gate_up)), rows)
        glu = super()._glu
        return torch.cat([glu(gate_up[begin : begin + rows]) for begin in parts])

    def _rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: HeadNorms | None
    ) -> None:
        rows = max(1, _MAX_ELEMENTS // qkv[0].numel())
        for begin in range(0, len(qkv), rows):
            part = slice(begin, begin + rows)
            super()._rotate(qkv[part], cos[part], sin[part], norms)

    def _paged(self, cache: KVCache) -> Callable[[Batch], Mix]:
        return FixedAttention(cache, self._config.num_heads, self._config.sliding_window).step


def _in_blocks(function: Product) -> Product:
    """The function of each row, computed for 16 rows at a time."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for begin in range(0, max(1, len(x)), _NUM_TOKENS):
            taken = x[begin : begin + _NUM_TOKENS]
            # A copy also when it is full: results may follow where in memory an operand begins.
            block = x.new_zeros(_NUM_TOKENS, x.shape[1])
            block[: len(taken)] = taken
            parts.append(function(block)[: len(taken)])
        return torch.cat(parts)

    return apply
