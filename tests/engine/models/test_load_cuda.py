"""Parameters filled by threads; on a GPU where there is one, else with the host's memory for it."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hillstar.engine.models import load_cuda
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.load_cuda import Copy, Filling


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few thousand bytes take many pieces."""
    monkeypatch.setattr(load_cuda, "_PIECE_BYTES", 1 << 10)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save(folder: Path) -> dict[str, tuple[Path, torch.Tensor]]:
    """Two files of tensors of several shapes and dtypes: name -> file, values."""
    generator = torch.Generator().manual_seed(4)
    found: dict[str, tuple[Path, torch.Tensor]] = {}
    for index, dtype in enumerate((torch.bfloat16, torch.float32)):
        shapes = ((100, 37), (7,), (1, 3), (33, 64), (5000,))
        tensors = {
            f"{index}.{number}": torch.randn(shape, generator=generator).to(dtype)
            for number, shape in enumerate(shapes)
        }
        path = folder / f"{index}.safetensors"
        save_file(tensors, path)
        found |= {name: (path, tensor) for name, tensor in tensors.items()}
    return found


def copies_of(
    stored: dict[str, tuple[Path, torch.Tensor]], device: torch.device
) -> tuple[list[Copy], dict[str, torch.Tensor]]:
    targets = {
        name: torch.full(values.shape, float("nan"), dtype=torch.bfloat16, device=device)
        for name, (_, values) in stored.items()
    }
    return [Copy(path, name, targets[name]) for name, (path, _) in stored.items()], targets


def test_every_value_arrives_in_the_targets_dtype(tmp_path: Path, device: torch.device) -> None:
    """All files, all pieces, converted; progress grows to the bytes that there are."""
    stored = save(tmp_path)
    copies, targets = copies_of(stored, device)
    reported: list[int] = []
    Filling(copies, reported.append).wait()
    for name, (_, values) in stored.items():
        assert torch.equal(targets[name].cpu(), values.bfloat16()), name
    assert reported == sorted(reported)
    assert reported[-1] == sum(values.nbytes for _, values in stored.values())
    assert len(reported) > 20


def test_a_file_that_ends_too_early_is_told(tmp_path: Path, device: torch.device) -> None:
    """Cut after its header was checked, it is an error that names the file."""
    stored = save(tmp_path)
    path = tmp_path / "1.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 5000)
    copies, _ = copies_of(stored, device)
    with pytest.raises(ModelError, match=r"1\.safetensors: ends within"):
        Filling(copies, lambda _: None).wait()


def test_what_progress_raises_ends_it(tmp_path: Path, device: torch.device) -> None:
    """A server that is gone while weights are loaded is noticed."""
    copies, _ = copies_of(save(tmp_path), device)

    def gone(_: int) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        Filling(copies, gone).wait()


def test_it_can_be_left_off(tmp_path: Path, device: torch.device) -> None:
    """`stop` returns with the threads ended; what had not begun is not read."""
    copies, targets = copies_of(save(tmp_path), device)
    goes_on = threading.Event()

    def hold(_: int) -> None:
        goes_on.wait()

    filling = Filling(copies, hold)
    stopper = threading.Thread(target=filling.stop)
    stopper.start()
    while not filling._is_over:
        pass
    goes_on.set()
    stopper.join()
    assert any(bool(target.isnan().any()) for target in targets.values())
