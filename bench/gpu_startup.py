"""From a folder of safetensors to the first token: an 8B shape on one GPU, caches cold and warm.

    python bench/gpu_startup.py [--out bench/results/h200-startup.json] [--dir DIR]

Writes a checkpoint of the Llama-3-8B shape (16 GB, four shards, bf16, random) to DIR's disk, then
starts engines in processes of their own, as the server does: imports, weights, kernels and graphs
(beside each other), the first token of a prompt of 128. The files' pages are dropped before each
start but the last. The disk's own rate is measured in the same run: O_DIRECT, 8 threads, one shard.

* cold: Triton has compiled nothing. warm: it has. again: as warm, with the files in the page cache.
* load_share: the rate of loading, from its begin to the last value, over the disk's.

The run is void unless what arrived on the device is what the files hold.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import finish, report
from hillstar.engine.assembly import assemble
from hillstar.engine.channel import QueueChannel
from hillstar.engine.config import EngineConfig
from hillstar.engine.messages import Frame, SamplingParams, Submit, pack_ids
from hillstar.engine.models.config import ModelConfig
from hillstar.engine.models.load import begin_loading, expected_shapes
from shape_8b import SEED, SHAPE_8B, VOCAB

NUM_SHARDS = 4
PERIOD = 64 << 20  # bytes after which the files' data repeat
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SHAPE_8B,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
THREADS = 8
READ_BYTES = 16 << 20


def pattern() -> np.ndarray:
    """What the files hold, over and over: bf16, as uint8 `[PERIOD]`."""
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn(PERIOD // 2, generator=generator) * 0.02
    return values.bfloat16().view(torch.uint8).numpy()


def write_checkpoint(folder: Path, data: np.ndarray) -> int:
    """config.json and the shards; bytes of tensors in all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = list(expected_shapes(ModelConfig.from_dir(folder)).items())
    share = -(-len(shapes) // NUM_SHARDS)
    shards = [shapes[i : i + share] for i in range(0, len(shapes), share)]

    def write(index: int) -> int:
        header, end = {}, 0
        for name, shape in shards[index]:
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{index + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        with path.open("wb", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for begin in range(0, end, PERIOD):
                file.write(data[: min(PERIOD, end - begin)].data)
            os.fsync(file.fileno())
        return end

    with ThreadPoolExecutor(NUM_SHARDS) as threads:
        return sum(threads.map(write, range(NUM_SHARDS)))


def drop_pages(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_bytes_s(path: Path) -> float:
    """Bytes a second of the file, read past the page cache."""
    size = path.stat().st_size // READ_BYTES * READ_BYTES

    def read(first: int) -> None:
        buffer = mmap.mmap(-1, READ_BYTES)  # O_DIRECT wants whole pages
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for offset in range(first * READ_BYTES, size, THREADS * READ_BYTES):
            assert os.preadv(descriptor, [buffer], offset) == READ_BYTES
        os.close(descriptor)

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, range(THREADS)))
    return size / (time.perf_counter() - start)


def start(folder: Path, spawned_s: float) -> dict[str, Any]:
    """In a process of its own: the seconds of each part, and whether the weights are right."""
    imported_s = time.time()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    began_s = time.time()
    model = ModelConfig.from_dir(folder)
    config = EngineConfig(
        model_dir=folder, model_name="8b", device="cuda", num_blocks=8192, max_model_len=32768
    )
    channel = QueueChannel()
    loaded_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal loaded_s
        if done == total:
            loaded_s = time.time()

    with begin_loading(
        folder, model, dtype=torch.bfloat16, device="cuda", progress=progress
    ) as loading:
        engine = assemble(config, model, loading.weights, inbox=channel, outbox=channel)
        torch.cuda.synchronize()
        assembled_s = time.time()
        weights = loading.wait()
    ready_s = time.time()
    prompt = np.random.default_rng(SEED).integers(3, VOCAB, size=128)
    firsts = []
    for index in range(2):
        asked_s = time.time()
        params = SamplingParams(max_tokens=1, temperature=0.0)
        channel.post(Submit(sequence_id=str(index), prompt_ids=pack_ids(prompt), params=params))
        outputs: list[Any] = []
        while not outputs:
            engine.loop.step()
            while not channel.outputs.empty():
                frame = channel.outputs.get_nowait()
                assert isinstance(frame, Frame)
                outputs += frame.outputs
        firsts.append(round(time.time() - asked_s, 3))
    return {
        "imports_s": round(imported_s - spawned_s, 2),
        "device_s": round(began_s - imported_s, 2),
        "load_s": round(loaded_s - began_s, 2),
        "assemble_s": round(assembled_s - began_s, 2),
        "ready_s": round(ready_s - spawned_s, 2),
        "first_token_s": firsts[0],
        "second_token_s": firsts[1],
        "weights_are_right": is_right(folder, weights.layers[17].down.values, 17)
        and is_right(folder, weights.layers[31].down.values, 31),
    }


def is_right(folder: Path, found: torch.Tensor, layer: int) -> bool:
    """Whether a layer's last matrix is what the file holds, read by plain means."""
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size)).get(name)
            if entry is not None:
                begin, end = entry["data_offsets"]
                file.seek(8 + size + begin)
                wanted = torch.frombuffer(bytearray(file.read(end - begin)), dtype=torch.bfloat16)
                return torch.equal(found.cpu().view(-1), wanted)
    return False


def run_child(folder: Path, cache: Path) -> dict[str, Any]:
    """`start` in a process whose Triton keeps what it compiles in `cache`."""
    command = [sys.executable, __file__, "--child", str(folder)]
    done = subprocess.run(
        [*command, repr(time.time())],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def timed(label: str, work: Callable[[], Any]) -> Any:
    began_s = time.perf_counter()
    found = work()
    print(f"{label}: {time.perf_counter() - began_s:.1f} s {found}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "hillstar-8b")
    parser.add_argument("--child", nargs=2)
    args = parser.parse_args()
    if args.child:
        folder, spawned_s = args.child
        print(json.dumps(start(Path(folder), float(spawned_s))))
        return
    folder = args.dir
    num_bytes = timed("written", lambda: write_checkpoint(folder, pattern()))
    shards = sorted(folder.glob("*.safetensors"))
    drop_pages(folder)
    disk = timed("disk bytes/s", lambda: disk_bytes_s(shards[1]))
    cache = folder / "triton"
    shutil.rmtree(cache, ignore_errors=True)
    starts = {}
    for name in ("cold", "warm", "again"):
        if name != "again":
            drop_pages(folder)
        starts[name] = timed(name, lambda: run_child(folder, cache))
    rates = {name: num_bytes / found["load_s"] for name, found in starts.items()}
    result = report(
        SEED,
        ceilings={"disk_read_GBps": round(disk / 1e9, 3)},
        checked={"weights": all(found.pop("weights_are_right") for found in starts.values())},
        load_GBps={name: round(rate / 1e9, 3) for name, rate in rates.items()},
        load_share={name: round(rate / disk, 3) for name, rate in rates.items()},
        **starts,
    )
    finish(result, args.out)
    shutil.rmtree(folder)
    if not result["checked"]["weights"]:
        raise SystemExit("the weights are not the files': the run is void")


if __name__ == "__main__":
    main()
