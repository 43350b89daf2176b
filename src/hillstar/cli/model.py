"""A model made ready: its folder, its configuration, and how much KV memory it is given."""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hillstar.cli import values
from hillstar.cli.machine import cpu_multiplies_bfloat16, find_gpu
from hillstar.cli.report import CommandError
from hillstar.engine.config import ConfigError, DeviceName, DTypeName
from hillstar.engine.memory import free_memory_bytes
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.size import DTYPE_BYTES, KVGroup, kv_groups, q4_bytes

_CPU_SHARE = 0.25  # of the RAM left beside the weights: the machine has other work
_CPU_MOST = 4 << 30  # bytes; more is for those who ask for it
_GPU_SHARE = 0.85  # of the memory left beside the weights: activations need the rest
_MIN_TOKENS = 1024  # a smaller pool serves nobody


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model on this machine and how it runs here."""

    dir: Path
    name: str
    config: ModelConfig
    device: DeviceName
    dtype: DTypeName
    free_bytes: int  # on the device, before the weights

    @property
    def weight_bytes(self) -> int:
        """The weights' size in memory; 0 for files that cannot be read: the engine says why."""
        num_values = sum(map(_num_values, self.dir.glob("*.safetensors")))
        size = num_values * DTYPE_BYTES[self.dtype]
        if (self.device, self.dtype) == ("cpu", "bfloat16"):
            size += q4_bytes(self.dir)
        return size

    def group(self, block_size: int) -> KVGroup:
        """The one KV group of today's models."""
        [group] = kv_groups(self.config, self.dtype, block_size)
        return group

    def kv_memory_bytes(self, settings: Mapping[str, Any], most_tokens: int) -> int:
        """Bytes of KV as asked for, else a share of the free memory, at most `most_tokens`."""
        group = self.group(settings["block_size"])
        if settings["kv_blocks"] and settings["kv_memory"]:
            asked = values.format_bytes(settings["kv_memory"])
            raise ConfigError("kv-memory", asked, "nothing, as kv-blocks is given too")
        if settings["kv_blocks"]:
            return int(settings["kv_blocks"]) * group.bytes_per_block
        if settings["kv_memory"]:
            if settings["kv_memory"] < 2 * group.bytes_per_block:
                asked = values.format_bytes(settings["kv_memory"])
                least = values.format_bytes(2 * group.bytes_per_block)
                raise ConfigError("kv-memory", asked, f"at least two blocks: {least}")
            return int(settings["kv_memory"])
        left = self.free_bytes - self.weight_bytes
        if self.device == "cuda":
            given = int(left * _GPU_SHARE)
        else:
            given = min(int(left * _CPU_SHARE), _CPU_MOST)
        if given < _MIN_TOKENS * group.bytes_per_token:
            raise CommandError(
                f"kv-memory: {values.format_bytes(self.free_bytes)} are free, which is too little"
                f" beside {values.format_bytes(self.weight_bytes)} of weights; name a size"
            )
        return min(given, most_tokens * group.bytes_per_token)

    def check_kv_fits(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError where more KV is asked for than this machine has memory for."""
        if not self.free_bytes:
            return  # the machine does not say
        group, weight_bytes = self.group(settings["block_size"]), self.weight_bytes
        most = max(0, self.free_bytes - weight_bytes)
        why = (
            f"({values.format_bytes(self.free_bytes)} are free on the {self.device}, of which the"
            f" weights take {values.format_bytes(weight_bytes)})"
        )
        if (settings["kv_memory"] or 0) > most:
            asked = values.format_bytes(settings["kv_memory"])
            raise ConfigError("kv-memory", asked, f"at most {values.format_bytes(most)} {why}")
        if (settings["kv_blocks"] or 0) > group.blocks_that_fit(most):
            allowed = f"at most {group.blocks_that_fit(most):,} {why}"
            raise ConfigError("kv-blocks", settings["kv_blocks"], allowed)


def prepare_model(name: str | None, data_dir: Path, settings: Mapping[str, Any]) -> PreparedModel:
    """Resolve model, device and dtype. Raises CommandError for a model that cannot be used."""
    folder, shown = _resolve(name, data_dir)
    try:
        config = ModelConfig.from_dir(folder)
    except ModelError as error:
        raise CommandError(str(error)) from None
    wanted = settings["device"]
    gpu = None if wanted == "cpu" else find_gpu()
    if wanted == "cuda" and gpu is None:
        raise ConfigError("device", "cuda", "cpu or auto: torch sees no CUDA GPU here")
    fast_bfloat16 = gpu is not None or cpu_multiplies_bfloat16()
    dtype: DTypeName = settings["dtype"]
    if settings["dtype"] == "auto":
        dtype = "bfloat16" if fast_bfloat16 else "float32"
    return PreparedModel(
        dir=folder,
        name=shown,
        config=config,
        device="cuda" if gpu else "cpu",
        dtype=dtype,
        free_bytes=gpu.free_bytes if gpu else free_memory_bytes() or 0,
    )


def _num_values(file: Path) -> int:
    """In a safetensors file, from its header; 0: it cannot be read."""
    try:
        with safe_open(file, "numpy") as stored:
            return sum(prod(stored.get_slice(name).get_shape()) for name in stored.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return 0


def _resolve(name: str | None, data_dir: Path) -> tuple[Path, str]:
    """(folder, name) of a model. A child does the work, whose libraries this process lacks.

    Raises CommandError where it was killed, SystemExit where it has said why it failed.
    """
    if name is not None and (folder := Path(name).expanduser()).joinpath("config.json").exists():
        return folder, folder.resolve().name
    command = [sys.executable, "-m", "hillstar", "fetch", "--json", "--data-dir", str(data_dir)]
    child = subprocess.run(
        [*command, *(["--", name] if name is not None else [])], stdout=subprocess.PIPE, text=True
    )
    if child.returncode < 0:  # by the system, where memory is short
        raise CommandError(f"signal {-child.returncode} ended the work on the model's files")
    if child.returncode != 0:
        sys.exit(child.returncode)  # it has said why
    answer = json.loads(child.stdout)
    return Path(answer["dir"]), answer["name"]


def data_dir_of(settings: Mapping[str, Any]) -> Path:
    """The data directory that was named, or the user's own."""
    named: Path | None = settings["data_dir"]
    return named if named is not None else values.default_data_dir()


def config_file_of(arguments: argparse.Namespace) -> Path | None:
    """The file of `--config`."""
    return Path(arguments.config).expanduser() if arguments.config else None
