"""`swiglu` against its reference."""

import pytest
import torch

from hillstar.kernels.activation import swiglu, swiglu_reference

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("num_tokens", "intermediate"), [(1, 16), (5, 123), (2, 1536)])
def test_agrees_with_the_reference(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    intermediate: int,
) -> None:
    """The kernel gives the reference's values, large and small gates included."""
    gate_up = torch.randn((num_tokens, 2 * intermediate), device=device, generator=generator)
    gate_up[:, ::7] *= 30
    gate_up = gate_up.to(dtype)
    torch.testing.assert_close(
        swiglu(gate_up), swiglu_reference(gate_up), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


def test_rows_may_be_strided(device: torch.device, generator: torch.Generator) -> None:
    """Rows of a wider matrix are read in place."""
    gate_up = torch.randn((3, 64), device=device, generator=generator)[:, 8:40]
    torch.testing.assert_close(swiglu(gate_up), swiglu_reference(gate_up))


def test_no_tokens_is_no_work(device: torch.device) -> None:
    """An empty batch gives an empty result."""
    assert swiglu(torch.empty((0, 8), device=device)).shape == (0, 4)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(8),
        torch.zeros((2, 7)),
        torch.zeros((8, 2)).T,
        torch.zeros((2, 8), dtype=torch.int32),
    ],
    ids=["rank", "odd", "stride", "dtype"],
)
def test_a_wrong_argument_is_named(bad: torch.Tensor) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    with pytest.raises(ValueError, match=r"^gate_up: "):
        swiglu(bad)
