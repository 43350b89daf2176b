"""`rms_norm` against its reference and against transformers' module."""

import pytest
import torch

from hillstar.kernels.norm import rms_norm, rms_norm_reference

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2.4e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (5, 123), (3, 576), (2, 1024)])
def test_agrees_with_the_reference(
    device: torch.device,
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    hidden: int,
) -> None:
    """The kernel gives the reference's rows for odd sizes."""
    x = torch.randn((num_tokens, hidden), device=device, generator=generator).to(dtype)
    weight = torch.randn(hidden, device=device, generator=generator).to(dtype)
    out, wanted = rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
def test_reference_is_the_llama_norm(dtype: torch.dtype) -> None:
    """The reference equals transformers' LlamaRMSNorm to the bit."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(96, eps=1e-6).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(7, 96).to(dtype)
    wanted = module(x).detach()
    assert torch.equal(rms_norm_reference(x, module.weight.detach(), 1e-6), wanted)


def test_rows_may_be_strided(device: torch.device, generator: torch.Generator) -> None:
    """Rows of a wider matrix are read in place, and the arguments stay as they were."""
    wide = torch.randn((4, 3 * 48), device=device, generator=generator)
    x = wide[:, 48:96]
    weight = torch.randn(48, device=device, generator=generator)
    before = wide.clone()
    out = rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, rms_norm_reference(x, weight, 1e-5))
    assert torch.equal(wide, before)


def test_no_tokens_is_no_work(device: torch.device) -> None:
    """An empty batch gives an empty result."""
    x = torch.empty((0, 32), device=device)
    assert rms_norm(x, torch.ones(32, device=device), 1e-5).shape == (0, 32)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("x", torch.zeros(8)),
        ("x", torch.zeros((2, 8), dtype=torch.int32)),
        ("x", torch.zeros((8, 2)).T),
        ("weight", torch.zeros(7)),
        ("weight", torch.zeros(8, dtype=torch.float16)),
    ],
)
def test_a_wrong_argument_is_named(device: torch.device, argument: str, bad: torch.Tensor) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    arguments = {"x": torch.zeros((2, 8)), "weight": torch.zeros(8)}
    given = {name: value.to(device) for name, value in (arguments | {argument: bad}).items()}
    with pytest.raises(ValueError, match=f"^{argument}: "):
        rms_norm(given["x"], given["weight"], 1e-5)
