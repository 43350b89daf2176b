"""`fixed_linear` and `fixed_gate_up_swiglu`: right, and the same bits whatever the batch."""

import pytest
import torch

from hillstar.kernels.linear_fixed import (
    fixed_gate_up_swiglu,
    fixed_gate_up_swiglu_reference,
    fixed_linear,
    fixed_linear_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
SHAPES = pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 200), (37, 2050)])
MOST_TOKENS = 130


def draw(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Rows of length 1, about."""
    drawn = torch.randn(shape, device=generator.device, generator=generator)
    return (drawn * shape[-1] ** -0.5).to(dtype)


def assert_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every row's error is small beside the row."""
    assert out.dtype == wanted.dtype and out.is_contiguous()
    tolerance = TOLERANCE[out.dtype]
    if out.dtype is torch.bfloat16 and not out.is_cuda:
        tolerance *= 2  # the interpreter truncates
    error = (out.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert float(error.max()) < tolerance  # also fails for NaN


@DTYPES
@SHAPES
@pytest.mark.parametrize("num_tokens", [5, 66])
def test_the_products_agree_with_their_references(
    generator: torch.Generator,
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
    num_tokens: int,
) -> None:
    """Every number of tokens, with tails, bias, residual and a wide result."""
    x = draw(dtype, generator, num_tokens, num_inputs)
    weight = draw(dtype, generator, num_outputs, num_inputs)
    bias = draw(dtype, generator, num_outputs)
    residual = draw(dtype, generator, num_tokens, num_outputs)
    wanted = fixed_linear_reference(x, weight, bias=bias, residual=residual)
    assert_near(fixed_linear(x, weight, bias=bias, residual=residual), wanted)
    wanted = fixed_linear_reference(x, weight, out_dtype=torch.float32)
    assert_near(fixed_linear(x, weight, out_dtype=torch.float32), wanted)
    gate_up = draw(dtype, generator, 2 * num_outputs, num_inputs)
    assert_near(fixed_gate_up_swiglu(x, gate_up), fixed_gate_up_swiglu_reference(x, gate_up))


@DTYPES
@SHAPES
def test_a_token_is_multiplied_alike_whatever_its_company(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
) -> None:
    """Bit for bit: alone, among any number of others, and at any place among them.

    Compiled, for all numbers of tokens. The interpreter multiplies tiles with numpy, whose order
    of sums follows the width: there only numbers that take the same tiles are compared.
    """
    x = draw(dtype, generator, MOST_TOKENS, num_inputs)
    weight = draw(dtype, generator, num_outputs, num_inputs)
    gate_up = draw(dtype, generator, 2 * num_outputs, num_inputs)
    residual = draw(dtype, generator, MOST_TOKENS, num_outputs)
    kinds = [[1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, MOST_TOKENS]]
    if device.type == "cpu":
        kinds = [[1, 16], [17, 64], [65, 66]]
    for sizes in kinds:
        seen: tuple[torch.Tensor, torch.Tensor] | None = None
        for size in sizes:
            # The first token, at each end of the company.
            for order in ([*range(size)], [*range(1, size), 0]):
                place = order.index(0)
                xs, rest = x[order], residual[order]
                found = (
                    fixed_linear(xs, weight, residual=rest)[place],
                    fixed_gate_up_swiglu(xs, gate_up)[place],
                )
                seen = seen or found
                assert all(torch.equal(a, b) for a, b in zip(found, seen, strict=True)), size


def test_what_does_not_fit_is_refused(generator: torch.Generator) -> None:
    """Wrong shapes, dtypes and counters are told by name."""
    x, weight = draw(torch.float32, generator, 2, 64), draw(torch.float32, generator, 33, 64)
    with pytest.raises(ValueError, match="weight"):
        fixed_linear(x, weight[:, :32])
    with pytest.raises(ValueError, match="even number"):
        fixed_gate_up_swiglu(x, weight)
    with pytest.raises(ValueError, match="out_dtype"):
        fixed_linear(x, weight, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="residual"):
        fixed_linear(x, weight, residual=x)
    long = draw(torch.float32, generator, 1, 4096)
    wide = draw(torch.float32, generator, 65, 4096)
    with pytest.raises(ValueError, match="counters"):
        none = torch.zeros(1, dtype=torch.int32, device=x.device)
        fixed_linear(long, wide, counters=none)
