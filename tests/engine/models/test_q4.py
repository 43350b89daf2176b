"""Linear weights of 4 bits."""

from pathlib import Path

import gguf
import pytest
import torch

from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.gguf import convert_gguf
from hillstar.engine.models.load import load_weights
from hillstar.engine.models.q4 import (
    GROUP,
    Q4Groups,
    Q4Matrix,
    load_q4,
    multiplies_fast,
    save_q4,
)
from hillstar.engine.models.size import q4_bytes
from support.tiny_gguf import write_gguf
from support.tiny_models import make_tiny


def random_groups(num_rows: int, num_columns: int) -> Q4Groups:
    generator = torch.Generator().manual_seed(num_rows)
    numbers = torch.rand(2, num_rows, num_columns // GROUP, generator=generator) - 0.5
    codes = torch.randint(0, 256, (num_rows, num_columns // 2), generator=generator)
    return Q4Groups(codes.byte(), numbers[0].half(), numbers[1].half())


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (176, 160)])
def test_the_product_is_that_of_the_values(num_tokens: int, shape: tuple[int, int]) -> None:
    """x @ values.T, but for rounding: 2^-8 of the summands' size from scales and zeros, and the
    sum's own."""
    groups = random_groups(*shape)
    x = torch.randn(num_tokens, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    product = Q4Matrix.pack(groups).multiply(x)
    assert product.dtype == torch.bfloat16
    expected = x.float() @ groups.values().T
    scales, offsets = groups.scales.float().abs(), groups.offsets.float().abs()
    largest = (offsets + 24 * scales).repeat_interleave(GROUP, dim=1)
    bound = 2**-8 * (x.float().abs() @ largest.T + expected.abs())
    assert bool(((product.float() - expected).abs() <= bound).all())
    assert bool((expected.abs() > 10 * bound).any())  # the bound says something


def test_stacked_matrices_multiply_as_one() -> None:
    """The rows of several matrices, one after the other."""
    parts = [random_groups(16, 64), random_groups(32, 64)]
    stacked = Q4Groups.stack(parts)
    assert torch.equal(stacked.values(), torch.cat([part.values() for part in parts]))


def test_rows_that_cannot_be_packed_are_refused() -> None:
    """torch packs 16 rows together."""
    with pytest.raises(ValueError, match="24 rows"):
        Q4Matrix.pack(random_groups(24, 32))


@pytest.mark.parametrize("has_product", [True, False])
def test_only_bfloat16_on_a_fast_cpu_is_multiplied_in_4_bits(
    has_product: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 keeps the values as they are, and so does a CPU without the product; a matrix whose
    rows cannot be packed keeps to its values alone."""
    monkeypatch.setattr("hillstar.engine.models.load.multiplies_fast", lambda: has_product)
    monkeypatch.setattr("hillstar.engine.models.load.can_pack", lambda rows: rows != 320)
    model = make_tiny("qwen3", hidden_size=128, intermediate_size=160, head_dim=32)
    write_gguf(tmp_path / "model.gguf", model, quantisation=gguf.GGMLQuantizationType.Q4_1)
    folder = convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")
    config = ModelConfig.from_dir(folder)
    exact = load_weights(folder, config, dtype=torch.float32)
    assert all(layer.qkv.q4 is None for layer in exact.layers)
    rounded = load_weights(folder, config, dtype=torch.bfloat16)
    for layer in rounded.layers:
        assert (layer.qkv.q4 is not None) == has_product
        assert (layer.down.q4 is not None) == has_product
        assert layer.gate_up.q4 is None


def test_the_fast_product_is_that_of_avx_512(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product for other CPUs would be slower than bfloat16."""
    for name, is_fast in (("AVX512", True), ("AVX2", False), ("DEFAULT", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        assert multiplies_fast() == is_fast


def test_their_size_is_known_without_loading_them(tmp_path: Path) -> None:
    """0.625 bytes a weight and the files' headers; nothing for a model that was never in 4 bits."""
    assert q4_bytes(tmp_path) == 0
    groups = random_groups(64, 512)
    save_q4(tmp_path, "model.safetensors", {"a.weight": random_groups(64, 512), "b.weight": groups})
    assert 0 < q4_bytes(tmp_path) - 2 * 64 * 512 * 0.625 < 1000
    assert torch.equal(load_q4(tmp_path)["b.weight"].values(), groups.values())
