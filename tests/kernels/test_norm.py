"""`rms_norm` against its reference and against transformers' module."""

import pytest
import torch

from hillstar.kernels.norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.4e-2, torch.float16: 2e-3}


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of a rounded sum: none, but the interpreter truncates to bfloat16."""
    return 2.0**-7 if dtype is torch.bfloat16 and device.type == "cpu" else 0.0


DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (5, 123), (3, 576), (2, 1024)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_agrees_with_the_reference(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    hidden: int,
    with_residual: bool,
) -> None:
    """The kernel gives the reference's rows for odd sizes, with and without a residual."""
    x, residual = torch.randn((2, num_tokens, hidden), device=device, generator=generator).to(dtype)
    weight = torch.randn(hidden, device=device, generator=generator).to(dtype)
    given = residual if with_residual else None
    out, residual_out = rms_norm(x, weight, 1e-5, given)
    wanted, wanted_residual = rms_norm_reference(x, weight, 1e-5, given)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(residual_out, wanted_residual, atol=0, rtol=rounding(dtype, device))


@DTYPES
def test_reference_is_the_llama_norm(dtype: torch.dtype) -> None:
    """The reference equals transformers' LlamaRMSNorm to the bit."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(7, 96).to(dtype)
    wanted = module(x).detach()
    assert torch.equal(rms_norm_reference(x, module.weight.detach(), 1e-6)[0], wanted)


def test_rows_may_be_strided(device: torch.device, generator: torch.Generator) -> None:
    """Rows of a wider matrix are read in place, and the arguments stay as they were."""
    wide = torch.randn((4, 3 * 48), device=device, generator=generator)
    x, residual = wide[:, 48:96], wide[:, 96:]
    weight = torch.randn(48, device=device, generator=generator)
    before = wide.clone()
    out, _ = rms_norm(x, weight, 1e-5, residual)
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5, residual)[0])
    assert torch.equal(wide, before)


def test_no_tokens_is_no_work(device: torch.device) -> None:
    """An empty batch gives empty results."""
    x = torch.empty((0, 32), device=device)
    out, residual_out = rms_norm(x, torch.ones(32, device=device), 1e-5, x)
    assert out.shape == residual_out.shape == (0, 32)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("x", torch.zeros(8)),
        ("x", torch.zeros((2, 8), dtype=torch.int32)),
        ("x", torch.zeros((8, 2)).T),
        ("weight", torch.zeros(7)),
        ("weight", torch.zeros(8, dtype=torch.float16)),
        ("residual", torch.zeros((3, 8))),
        ("residual", torch.zeros((8, 2)).T),
    ],
)
def test_a_wrong_argument_is_named(device: torch.device, argument: str, bad: torch.Tensor) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    arguments = {"x": torch.zeros((2, 8)), "weight": torch.zeros(8), "residual": torch.zeros(2, 8)}
    given = {name: value.to(device) for name, value in (arguments | {argument: bad}).items()}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rms_norm(given["x"], given["weight"], 1e-5, given["residual"])
