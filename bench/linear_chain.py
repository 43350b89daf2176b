"""Sequences of a decode step without attention: norms apart from the products or folded in."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from gpu_timing import time_s
from hillstar.kernels.activation import swiglu
from hillstar.kernels.linear import gate_up_swiglu_reference, linear_reference
from hillstar.kernels.linear_tuning import Tuning
from hillstar.kernels.norm import rms_norm
from linear_cases import (
    DEVICE,
    EPS,
    NUM_LAYERS,
    SHAPES,
    Case,
    Weights,
    make_counters,
    product,
    relative_error,
)

HIDDEN = SHAPES["o"][0]
LAYER_SHAPES = ("qkv", "o", "gate_up", "down")

Chosen = dict[tuple[str, bool], Tuning]  # by shape and pdl, of one number of tokens


@dataclass(frozen=True)
class Chain:
    """Layers without attention: the first HIDDEN columns of qkv stand for what it gives."""

    weights: Weights
    norms: torch.Tensor  # [2 * NUM_LAYERS, HIDDEN]
    counters: torch.Tensor
    chosen: Chosen

    @staticmethod
    def make(weights: Weights, chosen: Chosen) -> "Chain":
        """A chain with random norms over given weights."""
        norms = 1 + 0.1 * torch.randn((2 * NUM_LAYERS, HIDDEN), device=DEVICE)
        return Chain(weights, norms.bfloat16(), make_counters(), chosen)

    def library(self, x: torch.Tensor) -> torch.Tensor:
        """cuBLAS, which adds its products to the stream."""
        for layer in range(NUM_LAYERS):
            normed = rms_norm(x, self.norms[2 * layer], EPS)
            qkv = F.linear(normed, self.weights["qkv"][layer])
            x = torch.addmm(x, qkv[:, :HIDDEN], self.weights["o"][layer].T)
            normed = rms_norm(x, self.norms[2 * layer + 1], EPS)
            hidden = swiglu(F.linear(normed, self.weights["gate_up"][layer]))
            x = torch.addmm(x, hidden, self.weights["down"][layer].T)
        return x

    def ours(self, x: torch.Tensor, *, folds_norms: bool, pdl: bool) -> torch.Tensor:
        """The additions inside the products; norms apart, or inside the products after them."""
        for layer in range(NUM_LAYERS):
            qkv = self._normed("qkv", layer, x, folds_norms, pdl)
            x = self._run("o", layer, qkv[:, :HIDDEN], pdl, residual=x)
            hidden = self._normed("gate_up", layer, x, folds_norms, pdl)
            x = self._run("down", layer, hidden, pdl, residual=x)
        return x

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """By the references, the stream rounded where `ours` rounds it."""
        for layer in range(NUM_LAYERS):
            first, second = self.norms[2 * layer], self.norms[2 * layer + 1]
            weight = {shape: self.weights[shape][layer] for shape in LAYER_SHAPES}
            qkv = linear_reference(x, weight["qkv"], norm_weight=first, eps=EPS)
            x = linear_reference(qkv[:, :HIDDEN], weight["o"], residual=x)
            hidden = gate_up_swiglu_reference(x, weight["gate_up"], norm_weight=second, eps=EPS)
            x = linear_reference(hidden, weight["down"], residual=x)
        return x

    def normed_qkv(self, x: torch.Tensor, layer: int, *, folds_norms: bool) -> torch.Tensor:
        return self._normed("qkv", layer, x, folds_norms, False)

    def _normed(
        self, shape: str, layer: int, x: torch.Tensor, folds_norms: bool, pdl: bool
    ) -> torch.Tensor:
        norm_weight = self.norms[2 * layer + (shape == "gate_up")]
        if folds_norms:
            return self._run(shape, layer, x, pdl, norm_weight=norm_weight)
        return self._run(shape, layer, rms_norm(x, norm_weight, EPS), pdl)

    def _run(
        self, shape: str, layer: int, x: torch.Tensor, pdl: bool, **given: torch.Tensor
    ) -> torch.Tensor:
        case = Case(shape, len(x), self.chosen[shape, pdl])
        return product(case, x, self.weights[shape][layer], self.counters, **given)


def chain_cases(num_tokens: int, chosen: Chosen) -> Iterator[Case]:
    """What the sequences need compiled."""
    for pdl in (False, True):
        for shape in LAYER_SHAPES:
            case = Case(shape, num_tokens, chosen[shape, pdl])
            if shape in ("o", "down"):
                yield replace(case, has_residual=True)
            else:
                yield case
                yield replace(case, has_norm=True)


def sequences(num_tokens: int, chain: Chain) -> dict[str, float]:
    """Microseconds of the sequences; whole chains are checked against the references."""
    x = torch.randn((num_tokens, HIDDEN), device=DEVICE).bfloat16()
    wanted = chain.exact(x)
    whole: dict[str, Callable[[], torch.Tensor]] = {"library": partial(chain.library, x)}
    for folds_norms in (False, True):
        for pdl in (False, True):
            name = f"{'norms folded' if folds_norms else 'norms apart'}{', pdl' if pdl else ''}"
            whole[name] = partial(chain.ours, x, folds_norms=folds_norms, pdl=pdl)
    figures = {}
    allowed = 2 * relative_error(chain.library(x), wanted)  # what 32 layers of roundings come to
    for name, run in whole.items():
        error = relative_error(run(), wanted)
        assert error < allowed, (name, error, allowed)
        figures[f"chain, {name}"] = time_s([run])
        print(f"chain@{num_tokens}, {name}: {figures[f'chain, {name}'] * 1e6:.1f} us, {error:.4f}")
    for folds_norms in (False, True):
        runs = [
            partial(chain.normed_qkv, x, layer, folds_norms=folds_norms)
            for layer in range(NUM_LAYERS)
        ]
        figures[f"norm + qkv, {'folded' if folds_norms else 'apart'}"] = time_s([*runs])
    return {name: round(seconds * 1e6, 2) for name, seconds in figures.items()}
