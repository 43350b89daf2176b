"""`gate_up_swiglu` of many tokens against its reference."""

import pytest
import torch

from hillstar.kernels.linear import gate_up_swiglu, gate_up_swiglu_reference
from hillstar.kernels.linear_dense import can_describe, dense_glu
from hillstar.kernels.linear_tuning import MAX_TOKENS, DenseTuning, choose_dense_glu

SMALL = DenseTuning(16, 16, 16, num_warps=4, num_stages=2)
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 1.5e-3, torch.float32: 1e-5}


def draw(
    generator: torch.Generator, num_tokens: int, width: int, num_inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and a weight, gate and up."""
    device = generator.device
    x = torch.randn((num_tokens, num_inputs), device=device, generator=generator)
    weight = torch.randn((2 * width, num_inputs), device=device, generator=generator)
    return x.to(dtype), (weight * num_inputs**-0.5).to(dtype)


def assert_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every row's error is small beside the row."""
    assert out.dtype == wanted.dtype
    assert out.is_contiguous()
    error = (out.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert float(error.max()) < TOLERANCE[out.dtype]  # also fails for NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "width", "num_inputs"), [(16, 64, 64), (37, 152, 56), (3, 8, 200)]
)
def test_agrees_with_the_reference(
    generator: torch.Generator, dtype: torch.dtype, num_tokens: int, width: int, num_inputs: int
) -> None:
    """Whole tiles and tails of tokens, outputs and inputs give the reference's rows."""
    x, weight = draw(generator, num_tokens, width, num_inputs, dtype)
    assert_near(dense_glu(x, weight, SMALL), gate_up_swiglu_reference(x, weight))


def test_rows_may_be_strided(generator: torch.Generator) -> None:
    """Parts of wider matrices are read in place."""
    x, weight = draw(generator, 20, 32, 3 * 64, torch.float16)
    x, weight = x[:, 64:128], weight[:, 128:]
    assert can_describe(x, weight)
    assert_near(dense_glu(x, weight, SMALL), gate_up_swiglu_reference(x, weight))


@pytest.mark.parametrize(
    ("dtype", "num_inputs"), [(torch.float16, 64), (torch.float16, 60), (torch.float32, 64)]
)
def test_many_tokens_go_where_they_fit(
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_inputs: int,
) -> None:
    """What no descriptor fits goes to the library, with the same result; the norm comes first."""
    monkeypatch.setattr("hillstar.kernels.linear.choose_dense_glu", lambda *_: SMALL)
    x, weight = draw(generator, MAX_TOKENS + 1, 32, num_inputs, dtype)
    assert can_describe(x, weight) == (dtype is torch.float16 and num_inputs == 64)
    norm = torch.rand(num_inputs, device=x.device, generator=generator).to(dtype)
    out = gate_up_swiglu(x, weight, norm_weight=norm, eps=1e-5)
    wanted = gate_up_swiglu_reference(x, weight, norm_weight=norm, eps=1e-5)
    error = (out.float() - wanted.float()).norm() / wanted.float().norm()
    assert float(error) < TOLERANCE[torch.float16] + TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("num_tokens", "is_ours"),
    [(96, False), (113, True), (128, True), (192, False), (256, True), (384, False), (8192, False)],
)
def test_only_full_tiles_are_ours(num_tokens: int, is_ours: bool) -> None:
    """Tokens that leave a tile half empty, and those enough for many waves, go to the library; so
    do too few outputs to fill a device."""
    assert (choose_dense_glu(num_tokens, 14336) is not None) == is_ours
    assert choose_dense_glu(num_tokens, 1536) is None
