"""`linear` and `gate_up_swiglu` against their references, and against transformers' modules."""

from dataclasses import replace

import pytest
import torch

from hillstar.kernels.linear import (
    gate_up_swiglu,
    gate_up_swiglu_reference,
    linear,
    linear_reference,
)
from hillstar.kernels.linear_tuning import MAX_TOKENS, Tuning, choose_tuning
from hillstar.kernels.norm import rms_norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)

WHOLE_ROWS = Tuning(1, 4, 256, num_warps=4)
UNROLLED = Tuning(1, 8, 64, num_warps=2)
PIPELINED = Tuning(1, 8, 64, num_warps=4, num_stages=3)
TILE = Tuning(16, 16, 64, num_warps=4, num_stages=3)
SPLIT = replace(TILE, block_n=64, num_splits=3)
WIDE = Tuning(64, 64, 32, num_warps=4, num_stages=2)
CASES = [  # tokens, outputs, inputs
    (1, 64, 256, WHOLE_ROWS),
    (1, 37, 200, WHOLE_ROWS),
    (1, 64, 256, UNROLLED),
    (1, 37, 200, UNROLLED),
    (1, 37, 200, PIPELINED),
    (1, 64, 256, PIPELINED),
    (1, 37, 200, TILE),
    (5, 37, 200, TILE),
    (16, 64, 256, TILE),
    (3, 37, 200, SPLIT),
    (16, 128, 384, SPLIT),
    (2, 70, 65, replace(SPLIT, num_splits=4)),  # the last splits have no columns
    (33, 70, 200, WIDE),
    (64, 64, 64, replace(WIDE, num_splits=2)),
]
SHAPES = pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs", "tuning"), CASES)


class Draw:
    """Random tensors of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        self._dtype, self._generator = dtype, generator

    def __call__(self, *shape: int) -> torch.Tensor:
        device = self._generator.device
        return torch.randn(shape, device=device, generator=self._generator).to(self._dtype)


def assert_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every row's error is small beside the row."""
    assert out.dtype == wanted.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCE[out.dtype]
    if out.dtype is torch.bfloat16 and not out.is_cuda:
        tolerance *= 2  # the interpreter truncates
    error = (out.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    assert float(error.max()) < tolerance  # also fails for NaN


@DTYPES
@SHAPES
@pytest.mark.parametrize("has_extras", [False, True])
def test_linear_agrees_with_the_reference(
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    tuning: Tuning,
    has_extras: bool,
) -> None:
    """Every way to cut a product gives the reference's rows, tails included, with and without
    norm, bias and residual."""
    draw = Draw(dtype, generator)
    x, weight = draw(num_tokens, num_inputs), draw(num_outputs, num_inputs)
    given = {}
    if has_extras:
        given = {
            "bias": draw(num_outputs) * 8,
            "residual": draw(num_tokens, num_outputs) * 8,
            "norm_weight": draw(num_inputs),
        }
    out = linear(x, weight, **given, eps=1e-5, tuning=tuning)
    assert_near(out, linear_reference(x, weight, **given, eps=1e-5))


@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs", "tuning"),
    [case for case in CASES if case[-1].num_splits == 1],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_gate_up_swiglu_agrees_with_the_reference(
    generator: torch.Generator,
    dtype: torch.dtype,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    tuning: Tuning,
    has_norm: bool,
) -> None:
    """Both halves meet row by row, whatever the cut."""
    draw = Draw(dtype, generator)
    x = draw(num_tokens, num_inputs)
    weight = draw(2 * num_outputs, num_inputs) * num_inputs**-0.5
    norm_weight = draw(num_inputs) if has_norm else None
    out = gate_up_swiglu(x, weight, norm_weight=norm_weight, eps=1e-5, tuning=tuning)
    wanted = gate_up_swiglu_reference(x, weight, norm_weight=norm_weight, eps=1e-5)
    assert_near(out, wanted)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "tuning"), [(1, UNROLLED), (5, TILE), (5, SPLIT)])
def test_the_norm_inside_is_the_norm_before(
    generator: torch.Generator, dtype: torch.dtype, num_tokens: int, tuning: Tuning
) -> None:
    """A folded norm gives what `rms_norm` and a product give, within the dtype's rounding, also
    for rows far from unit size."""
    draw = Draw(dtype, generator)
    x = draw(num_tokens, 200) * (0.01 if dtype is torch.float16 else 30)
    weight, norm_weight = draw(48, 200), draw(200)
    out = linear(x, weight, norm_weight=norm_weight, eps=1e-6, tuning=tuning)
    normed = rms_norm_reference(x, norm_weight, 1e-6)
    assert_near(out, linear_reference(normed, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "tuning"), [(1, UNROLLED), (5, TILE), (5, SPLIT), (MAX_TOKENS + 1, None)]
)
def test_a_wide_result_is_not_rounded(
    generator: torch.Generator, dtype: torch.dtype, num_tokens: int, tuning: Tuning | None
) -> None:
    """With `out_dtype` float32 the sums come back as they are, whatever the weights' dtype."""
    draw = Draw(dtype, generator)
    x, weight, bias, residual = (
        draw(num_tokens, 200),
        draw(37, 200),
        draw(37),
        draw(num_tokens, 37),
    )
    given = {"bias": bias, "residual": residual, "out_dtype": torch.float32}
    out = linear(x, weight, **given, tuning=tuning)
    assert_near(out, linear_reference(x, weight, **given))


def test_a_narrow_result_of_wide_weights_is_refused(device: torch.device) -> None:
    """A result has the dtype of the weights, or float32."""
    x = torch.zeros((1, 8), device=device)
    with pytest.raises(ValueError, match=r"^out_dtype: torch.float16; expected torch.float32"):
        linear(x, torch.zeros((6, 8), device=device), out_dtype=torch.float16)


@pytest.mark.parametrize("tuning", [UNROLLED, TILE, SPLIT])
def test_rows_may_be_strided(generator: torch.Generator, tuning: Tuning) -> None:
    """Parts of wider matrices are read in place, and the arguments stay as they were."""
    draw = Draw(torch.float32, generator)
    wide, tall = draw(1, 3 * 100), draw(40, 2 * 100)
    x, residual, weight = wide[:, 100:200], wide[:, 200:240], tall[:, 100:]
    before = wide.clone(), tall.clone()
    out = linear(x, weight, residual=residual, tuning=tuning)
    assert_near(out, linear_reference(x, weight, residual=residual))
    assert torch.equal(wide, before[0])
    assert torch.equal(tall, before[1])


def test_a_split_product_leaves_the_counters_as_it_found_them(
    device: torch.device, generator: torch.Generator
) -> None:
    """One tensor of zeros serves one split product after the other, with the same bits each
    time."""
    draw = Draw(torch.float32, generator)
    x, weight = draw(5, 200), draw(130, 200)
    counters = torch.zeros(8, dtype=torch.int32, device=device)
    first, second = (linear(x, weight, tuning=SPLIT, counters=counters) for _ in range(2))
    assert not counters.any()
    assert torch.equal(first, second)
    assert torch.equal(first, linear(x, weight, tuning=SPLIT))


def test_overlapped_launches_see_what_came_before(
    device: torch.device, generator: torch.Generator
) -> None:
    """With programmatic dependent launch a product that needs the one before it waits for it."""
    draw = Draw(torch.float32, generator)
    x, weights = draw(1, 64), [draw(64, 64) / 8 for _ in range(12)]
    if device.type == "cuda":
        torch.cuda.synchronize()  # weights are older than the kernel before
    wanted = x
    out = x
    for index, weight in enumerate(weights):
        tuning = (UNROLLED, TILE, replace(SPLIT, num_splits=2))[index % 3]
        out = linear(out, weight, tuning=replace(tuning, pdl=True))
        wanted = linear_reference(wanted, weight)
    error = (out - wanted).norm() / wanted.norm()
    assert float(error) < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 3, 20, MAX_TOKENS, MAX_TOKENS + 1])
def test_the_choice_fits_the_call(generator: torch.Generator, num_tokens: int) -> None:
    """Left to itself, a product takes a cut that fits, or the library, with the same result."""
    draw = Draw(torch.float16, generator)
    x, weight, norm_weight = draw(num_tokens, 96), draw(80, 96) / 8, draw(96)
    given = {"bias": draw(80), "residual": draw(num_tokens, 80), "norm_weight": norm_weight}
    out = linear(x, weight, **given, eps=1e-5)
    assert_near(out, linear_reference(x, weight, **given, eps=1e-5))
    assert_near(linear(x, weight), linear_reference(x, weight))
    out = gate_up_swiglu(x, weight, norm_weight=norm_weight, eps=1e-5)
    assert_near(out, gate_up_swiglu_reference(x, weight, norm_weight=norm_weight, eps=1e-5))


@pytest.mark.parametrize("num_tokens", range(1, MAX_TOKENS + 1))
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(6144, 4096), (4096, 4096), (4096, 14336), (128256, 4096), (576, 576), (576, 1536)],
)
def test_chosen_tunings_are_legal(num_tokens: int, num_outputs: int, num_inputs: int) -> None:
    """A chosen cut holds the tokens, and never splits what cannot be split."""
    for glu in (False, True):
        tuning = choose_tuning(num_tokens, num_outputs, num_inputs, glu=glu)
        if tuning is None:
            continue
        assert tuning.block_m >= num_tokens
        assert tuning.num_splits == 1 or (tuning.block_m > 1 and not glu)


def test_the_reference_is_the_llama_mlp() -> None:
    """Gate and up in one product, and down with the residual, are transformers' LlamaMLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    module = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=80))
    x, residual = torch.randn(2, 7, 64)
    with torch.no_grad():
        wanted = residual + module(x)
        gate_up = torch.cat((module.gate_proj.weight, module.up_proj.weight))
        hidden = gate_up_swiglu_reference(x, gate_up)
        out = linear_reference(hidden, module.down_proj.weight, residual=residual)
    torch.testing.assert_close(out, wanted)


def test_no_tokens_is_no_work(device: torch.device) -> None:
    """An empty batch gives an empty result."""
    x, weight = torch.empty((0, 32), device=device), torch.zeros((48, 32), device=device)
    assert linear(x, weight).shape == (0, 48)
    assert gate_up_swiglu(x, weight).shape == (0, 24)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("x", torch.zeros(8)),
        ("x", torch.zeros((2, 8), dtype=torch.int32)),
        ("x", torch.zeros((8, 2)).T),
        ("weight", torch.zeros((6, 7))),
        ("weight", torch.zeros((6, 8), dtype=torch.float16)),
        ("weight", torch.zeros((8, 6)).T),
        ("bias", torch.zeros(7)),
        ("residual", torch.zeros((3, 6))),
        ("residual", torch.zeros((6, 2)).T),
        ("norm_weight", torch.zeros(6)),
        ("counters", torch.zeros(1)),
        ("counters", torch.zeros(0, dtype=torch.int32)),
    ],
)
def test_a_wrong_argument_is_named(device: torch.device, argument: str, bad: torch.Tensor) -> None:
    """A wrong shape, dtype or stride raises a ValueError that names the argument."""
    given = {"x": torch.zeros((2, 8)), "weight": torch.zeros((6, 8))} | {argument: bad}
    on_device = {name: value.to(device) for name, value in given.items()}
    x, weight = on_device.pop("x"), on_device.pop("weight")
    with pytest.raises(ValueError, match=f"^{argument}: "):
        linear(x, weight, tuning=SPLIT, **on_device)


@pytest.mark.parametrize(
    "tuning", [UNROLLED, replace(UNROLLED, num_splits=2), replace(TILE, block_m=1, num_splits=2)]
)
def test_a_tuning_that_does_not_fit_is_refused(device: torch.device, tuning: Tuning) -> None:
    """More tokens than a program holds, or a split of what is not split, raise a ValueError."""
    weight = torch.zeros((6, 8), device=device)
    with pytest.raises(ValueError, match=r"^tuning: "):
        linear(torch.zeros((2, 8), device=device), weight, tuning=tuning)


def test_the_halves_of_a_glu_are_whole(device: torch.device) -> None:
    """An odd number of rows, or a split, is no gate and up."""
    x = torch.zeros((2, 8), device=device)
    with pytest.raises(ValueError, match=r"^weight: 7 rows"):
        gate_up_swiglu(x, torch.zeros((7, 8), device=device), tuning=TILE)
    with pytest.raises(ValueError, match=r"^tuning: num_splits is 3"):
        gate_up_swiglu(x, torch.zeros((6, 8), device=device), tuning=SPLIT)
