"""The engine as a process: how it starts, what it survives, how it ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from hillstar.engine.messages import (
    Cancel,
    Failed,
    Loading,
    SamplingParams,
    Shutdown,
    Submit,
    pack_ids,
)
from support.engine_process import EngineProcess
from support.tiny_models import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save_tiny("llama", folder)


@pytest.fixture
def engine(tiny: tuple[Path, PreTrainedModel]) -> Iterator[EngineProcess]:
    with EngineProcess(tiny[0]) as process:
        yield process


def _submit(name: str, prompt: list[int], max_tokens: int, **changes: object) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    values: dict[str, object] = {"lease_id": None, **changes}
    return Submit(sequence_id=name, prompt_ids=pack_ids(prompt), params=params, **values)  # type: ignore[arg-type]


def _greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_it_loads_generates_and_shuts_down(
    engine: EngineProcess, tiny: tuple[Path, PreTrainedModel]
) -> None:
    """The tokens of a whole engine process are transformers' greedy tokens, turn after turn."""
    ready = engine.start()
    assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (64, 8, 256)
    loading = [message for message in engine.messages if isinstance(message, Loading)]
    assert loading and loading[-1].done == loading[-1].total > 0
    command = Path(f"/proc/{engine.process.pid}/cmdline").read_bytes()
    assert command.startswith(b"hillstar-engine")

    prompt = [5, 17, 31, 8, 250, 99, 3, 77, 120, 44]
    engine.send(_submit("first", prompt, 12, lease_id="chat"))
    engine.read_finish("first")
    assert engine.tokens["first"] == _greedy(tiny[1], prompt, 12)

    turn = [*prompt, *engine.tokens["first"], 60, 61, 62]
    engine.send(_submit("second", turn, 9, lease_id="chat"))
    engine.read_finish("second")
    assert engine.tokens["second"] == _greedy(tiny[1], turn, 9)
    assert engine.finishes["second"].usage.num_cached_tokens == len(prompt) + 11

    engine.send(Shutdown())
    assert engine.wait_exit()[0] == 0


def test_it_ends_soon_after_its_server(engine: EngineProcess) -> None:
    """An engine whose socket is closed exits within a second, also in the middle of work."""
    engine.start()
    engine.send(_submit("endless", [1, 2, 3], 200))
    engine.read_until(lambda: "endless" in engine.tokens)
    engine.socket.close()
    status, elapsed_s = engine.wait_exit()
    assert status == 0
    assert elapsed_s < 2.0  # a second, and the interpreter's own exit


def test_sigint_is_the_servers_business(engine: EngineProcess) -> None:
    """Ctrl-C in the terminal reaches the engine too, and changes nothing there."""
    engine.start()
    engine.process.send_signal(signal.SIGINT)
    engine.send(_submit("after", [1, 2, 3], 4))
    engine.read_finish("after")
    assert len(engine.tokens["after"]) == 4


def test_sigterm_ends_it_at_a_step(engine: EngineProcess) -> None:
    """SIGTERM ends an idle engine at once and with status 0."""
    engine.start()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait_exit()[0] == 0


def test_messages_that_mean_nothing_are_dropped(engine: EngineProcess) -> None:
    """Garbage, unknown messages and impossible values reach nobody else."""
    engine.start()
    engine.send_payload(b"\xc1")
    engine.send_payload(msgspec.msgpack.encode({"type": "nonsense"}))
    engine.send_payload(os.urandom(200))
    engine.send(_submit("vocabulary", [1, 100_000], 4))
    engine.send(Cancel("nobody"))
    engine.send(_submit("good", [1, 2, 3], 4))
    engine.read_finish("vocabulary", "good")
    assert engine.finishes["vocabulary"].code == "invalid_value"
    assert engine.finishes["good"].reason == "length"


def test_a_model_that_is_not_there_is_said_once(tmp_path: Path) -> None:
    """An engine that cannot start says why in one message and exits with status 1."""
    with EngineProcess(tmp_path / "nothing") as engine:
        engine.configure()
        engine.read_until(lambda: isinstance(engine.messages[-1], Failed))
        failed = engine.messages[-1]
        assert isinstance(failed, Failed) and str(tmp_path / "nothing") in failed.message
        assert engine.wait_exit()[0] == 1


def test_a_configuration_that_is_not_one_is_said_once(tiny: tuple[Path, PreTrainedModel]) -> None:
    """A first frame that is no valid configuration ends in `Failed`, not in a traceback alone."""
    with EngineProcess(tiny[0]) as engine:
        engine.send_payload(msgspec.msgpack.encode({"model_dir": "x", "block_size": 7}))
        engine.read_until(lambda: isinstance(engine.messages[-1], Failed))
        assert engine.wait_exit()[0] == 1


def test_a_server_that_leaves_before_the_configuration(
    tiny: tuple[Path, PreTrainedModel],
) -> None:
    """An engine that never got a configuration ends with its socket."""
    with EngineProcess(tiny[0]) as engine:
        engine.socket.close()
        assert engine.wait_exit()[0] == 0
