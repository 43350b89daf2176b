"""Linear weights of 4 bits, kept as they were quantised beside their dequantised values.

A few tokens a step are bound by the bytes of the weights: 0.625 a value here instead of 2. GGUF's
Q4_0 and Q4_1 cut a row into groups of 32 values `offset + scale * code`, codes 0 to 15
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). torch multiplies exactly this on
AVX-512, with the scale and the value of code 8 in bfloat16; that rounds a weight about as much
as storing the weight in bfloat16 does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hillstar.engine.models.size import Q4_FOLDER

GROUP = 32
"""Values that share a scale and an offset."""

_PARTS = ("codes", "scales", "offsets")
_ROWS_MULTIPLE = 16  # that torch packs together
_INNER_K_TILES = 1  # an argument of torch's that its CPU kernel does not use


@dataclass(frozen=True, slots=True)
class Q4Groups:
    """A matrix as it was quantised: `[N, K]` values, K a multiple of `GROUP`."""

    codes: torch.Tensor  # uint8 [N, K // 2]: value 2 i in the low bits, 2 i + 1 in the high ones
    scales: torch.Tensor  # float16 [N, K // GROUP]
    offsets: torch.Tensor  # float16 [N, K // GROUP]: the value of code 0

    @staticmethod
    def stack(matrices: Iterable["Q4Groups"]) -> "Q4Groups":
        """One matrix of all their rows, in order."""
        parts = [(matrix.codes, matrix.scales, matrix.offsets) for matrix in matrices]
        return Q4Groups(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def values(self) -> torch.Tensor:
        """float32 `[N, K]`."""
        codes = self._unpacked().view(*self.scales.shape, GROUP)
        scales, offsets = self.scales.float()[..., None], self.offsets.float()[..., None]
        return (codes * scales + offsets).flatten(1)

    def _unpacked(self) -> torch.Tensor:
        """The codes as int32 `[N, K]`."""
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1).int()


@dataclass(frozen=True, slots=True)
class Q4Matrix:
    """A matrix in the layout that torch multiplies. Made by `pack`."""

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor  # bfloat16 [K // GROUP, N, 2]; the zero is the value of code 8

    @staticmethod
    def pack(groups: Q4Groups) -> "Q4Matrix":
        """Raises ValueError for a number of rows that torch cannot pack (`can_pack`)."""
        if not can_pack(len(groups.scales)):
            raise ValueError(f"{len(groups.scales)} rows: not a multiple of {_ROWS_MULTIPLE}")
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            groups._unpacked(), _INNER_K_TILES
        )
        scales, offsets = groups.scales.float(), groups.offsets.float()
        pairs = torch.stack((scales, offsets + 8 * scales), dim=-1)
        return Q4Matrix(packed, pairs.transpose(0, 1).contiguous().bfloat16())

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x @ matrix.T: bfloat16 `[T, K]` -> bfloat16 `[T, N]`, sums in float32."""
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, GROUP, self.scales_and_zeros
        )
        return product


def can_pack(num_rows: int) -> bool:
    """Whether `Q4Matrix.pack` takes a matrix of so many rows."""
    return num_rows % _ROWS_MULTIPLE == 0


def multiplies_fast() -> bool:
    """Whether torch has a vectorised product for this CPU; its plain one is 10 times slower."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def save_q4(model_dir: Path, file: str, matrices: dict[str, Q4Groups]) -> None:
    """Write matrices, by the names of their dequantised tensors, beside a model's own files."""
    if not matrices:
        return
    folder = model_dir / Q4_FOLDER
    folder.mkdir(exist_ok=True)
    state = {
        f"{name}.{part}": getattr(matrix, part)
        for name, matrix in matrices.items()
        for part in _PARTS
    }
    save_file(state, folder / file)
    (folder / file).chmod(0o644)  # save_file keeps it from other users


def load_q4(model_dir: Path) -> dict[str, Q4Groups]:
    """What `save_q4` wrote, memory-mapped; empty for a model that was never quantised so."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(model_dir / Q4_FOLDER):
        matrix, _, part = name.rpartition(".")
        found.setdefault(matrix, {})[part] = tensor
    return {name: Q4Groups(**parts) for name, parts in found.items()}


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
