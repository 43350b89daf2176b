"""The command line: settings, their sources, and what a person reads when one is wrong."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hillstar.__main__ import main
from hillstar.cli import values
from hillstar.cli.machine import cpu_multiplies_bfloat16
from hillstar.cli.model import PreparedModel
from hillstar.cli.options import BENCH, CHAT, SERVE, build_parser
from hillstar.cli.serve import describe, engine_config, server_config
from hillstar.cli.settings import Setting, resolve
from hillstar.engine.config import ConfigError
from hillstar.engine.models.config import ModelConfig, RopeConfig

GiB = 1 << 30


def serve_settings(*flags: str, file: Path | None = None) -> dict[str, Any]:
    return resolve(SERVE, build_parser().parse_args(["serve", *flags]), file)


def a_model(tmp_path: Path, free_bytes: int = 8 * GiB) -> PreparedModel:
    config = ModelConfig(
        architecture="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    return PreparedModel(tmp_path, "llama", config, "cpu", "bfloat16", free_bytes)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hillstar", *arguments], capture_output=True, text=True, timeout=60
    )


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("hillstar: error: ")
    return captured.err


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_server_that_is_not_there_is_said_at_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing listens at the address: one line that names it and what to do, and exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert main([command, "--url", f"http://127.0.0.1:{port}"]) == 1
    said = error_line(capsys)
    assert f"http://127.0.0.1:{port}" in said
    assert "hillstar serve" in said


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Who types the bare name wants to know what there is; a script learns that it did nothing."""
    assert main([]) == 2
    assert "serve a model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--port", "70000"], ["port", "'70000'", "0 to 65535"]),
        (["--port", "http"], ["port", "'http'", "an integer"]),
        (["--device", "tpu"], ["device", "'tpu'", "auto, cpu, cuda"]),
        (["--dtype", "int4"], ["dtype", "'int4'", "bfloat16"]),
        (["--kv-memory", "4 potatoes"], ["kv-memory", "'4 potatoes'", "4GiB"]),
        (["--kv-memory", "0GiB"], ["kv-memory", "'0GiB'"]),
        (["--kv-blocks", "1"], ["kv-blocks", "'1'", "from 2"]),
        (["--block-size", "24"], ["block-size", "'24'", "a power of two from 8 to 256"]),
        (["--max-num-seqs", "0"], ["max-num-seqs", "'0'", "1 to 4096"]),
        (["--allow-origin", "example.org"], ["allow_origins", "'example.org'"]),
        (["--host", "0.0.0.0"], ["host", "'0.0.0.0'", "loopback"]),
        (["--model", ""], ["model", "''"]),
        (["--config", "/nowhere.toml"], ["config", "/nowhere.toml", "TOML"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_code_2(
    flags: Sequence[str], names: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Field, value and what is expected, on one line; no traceback, nothing started."""
    assert main(["serve", *flags]) == 2
    line = error_line(capsys)
    assert all(name in line for name in names), line


@pytest.mark.parametrize("command", [["size"], ["serve", "--model"]])
def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(command: Sequence[str]) -> None:
    """`size` and `serve` say once what a model's name may be: it is a wrong value."""
    done = run(*command, "/no/such/model")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    named = ("model: '/no/such/model'", "Hugging Face folder", ".gguf", "smollm2-135m-instruct")
    assert all(name in done.stderr for name in named), done.stderr


def test_help_loads_no_heavy_library() -> None:
    """`hillstar --help` needs neither torch nor aiohttp nor rich, so it answers at once."""
    program = (
        "import sys\n"
        "from hillstar.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'aiohttp', 'rich', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


def test_serving_keeps_torch_out_of_the_server_process() -> None:
    """The server process imports no torch: the engine's process has it."""
    program = "import sys, hillstar.cli.serve\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    """Each setting is taken from the first place that gives it."""
    file = tmp_path / "hillstar.toml"
    file.write_text('port = 9000\nkv-memory = "2GiB"\nmax_num_seqs = 8\ndebug = true\n')
    settings = serve_settings("--port", "9001", file=file)
    assert settings["port"] == 9001
    assert settings["kv_memory"] == 2 * GiB
    assert settings["max_num_seqs"] == 8
    assert settings["debug"] is True
    assert settings["block_size"] == 16


def test_a_repeated_flag_and_a_list_in_the_file_are_the_same(tmp_path: Path) -> None:
    """`--allow-origin A --allow-origin B` is `allow-origin = [A, B]`."""
    file = tmp_path / "hillstar.toml"
    file.write_text('allow-origin = ["https://a.example", "https://b.example"]\n')
    flags = ("--allow-origin", "https://a.example", "--allow-origin", "https://b.example")
    assert serve_settings(*flags)["allow_origin"] == serve_settings(file=file)["allow_origin"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("prot = 1", ["prot", "port"]),
        ("port = 70000", ["port", "70000"]),
        ("port = [1]", ["port", "single value"]),
        ("debug = 'yes'", ["debug", "yes", "true or false"]),
        ("port = ", ["TOML"]),
        ("[server]\nport = 1", ["server"]),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, names: Sequence[str]) -> None:
    """An unknown key, a wrong value or a broken file: never ignored."""
    file = tmp_path / "hillstar.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        serve_settings(file=file)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * GiB), ("512mib", GiB // 2), ("1.5 GB", 1_500_000_000), ("1048576", 1 << 20)],
)
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    """Binary and decimal units, upper or lower case, or plain bytes."""
    assert values.size_bytes("kv-memory", text) == num_bytes


def test_settings_become_both_configurations(tmp_path: Path) -> None:
    """What was asked for arrives where it belongs."""
    sizes = ("--kv-blocks", "100", "--block-size", "32", "--max-num-seqs", "2048")
    others = ("--max-model-len", "4096", "--data-dir", str(tmp_path), "--drain-timeout", "5")
    settings = serve_settings(*sizes, *others)
    engine = engine_config(settings, a_model(tmp_path))
    assert (engine.num_blocks, engine.kv_memory_bytes) == (100, None)
    assert (engine.block_size, engine.max_model_len) == (32, 4096)
    assert engine.max_batched_tokens == 2048
    server = server_config(settings)
    assert (server.port, server.data_dir, server.drain_timeout_s) == (8040, tmp_path, 5.0)


def test_the_context_limit_comes_from_the_model(tmp_path: Path) -> None:
    """The model's own limit by default; more than that is refused."""
    model = a_model(tmp_path)
    assert engine_config(serve_settings(), model).max_model_len == 8192
    with pytest.raises(ConfigError, match=r"max-model-len: 8193.*8192"):
        engine_config(serve_settings("--max-model-len", "8193"), model)


def test_kv_memory_is_a_share_of_what_is_free_and_no_more_than_can_be_used(
    tmp_path: Path,
) -> None:
    """A part of the memory beside the weights, capped by what all sequences together need."""
    engine = engine_config(serve_settings(), a_model(tmp_path, 8 * GiB))
    assert engine.kv_memory_bytes == 2 * GiB
    much = engine_config(serve_settings(), a_model(tmp_path, 800 * GiB))
    assert much.kv_memory_bytes == 4 * GiB
    few = serve_settings("--max-num-seqs", "1", "--max-model-len", "1024")
    assert engine_config(few, a_model(tmp_path)).kv_memory_bytes == 1024 * 131072
    assert "16,384 tokens in 1,024 blocks" in describe(engine, a_model(tmp_path))


def test_both_kv_sizes_at_once_are_refused(tmp_path: Path) -> None:
    """One size of the KV cache, not two."""
    settings = serve_settings("--kv-blocks", "100", "--kv-memory", "1GiB")
    with pytest.raises(ConfigError, match=r"kv-memory: '1\.0 GiB'.*kv-blocks"):
        engine_config(settings, a_model(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-memory", "9GiB"), r"kv-memory: '9\.0 GiB'.*at most 7\.0 GiB \(8\.0 GiB are free"),
        (("--kv-blocks", "4096"), r"kv-blocks: 4096.*at most 3,584 \(8\.0 GiB .* take 1\.0 GiB"),
        (("--kv-memory", "3MiB"), r"kv-memory: '3\.0 MiB'.*at least two blocks: 4\.0 MiB"),
    ],
)
def test_kv_memory_that_cannot_be_had_is_a_wrong_value(
    tmp_path: Path, flags: Sequence[str], message: str
) -> None:
    """More than is free beside the weights, or less than two blocks: refused before any work."""
    header = {"w": {"dtype": "F16", "shape": [1 << 29], "data_offsets": [0, 1 << 30]}}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + (1 << 30))  # a hole: it takes no space
    with pytest.raises(ConfigError, match=message):
        engine_config(serve_settings(*flags), a_model(tmp_path))


@pytest.mark.parametrize(
    ("text", "has_it"),
    [
        ("flags\t\t: fpu sse avx512f avx512_bf16 amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu sse avx2\n", False),
    ],
)
def test_bfloat16_is_chosen_where_the_cpu_multiplies_it(
    tmp_path: Path, text: str, has_it: bool
) -> None:
    """Read from the CPU's flags."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name : bf16 lookalike\n{text}")
    assert cpu_multiplies_bfloat16(file) == has_it


@pytest.mark.parametrize("settings", [SERVE, CHAT, BENCH])
def test_every_setting_says_what_it_is(settings: Sequence[Setting]) -> None:
    """Each has a help text and a name of its own."""
    assert all(setting.help for setting in settings)
    assert len({setting.key for setting in settings}) == len(settings)


@pytest.mark.model
def test_size_prints_bytes_and_tokens() -> None:
    """2 * layers * KV heads * head dim * bytes, for a token and a block, and what fits."""
    done = run("size", "--kv-memory", "1GiB", "--dtype", "bfloat16", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "23,040 bytes" in done.stdout
    assert "368,640 bytes" in done.stdout
    assert "2,912 blocks, 46,592 tokens" in done.stdout


@pytest.mark.model
def test_a_killed_fetch_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` says so where the system ended what reads the model's files: nobody else can."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert main(["serve", "--data-dir", str(tmp_path / "data")]) == 1
    assert "signal 9" in error_line(capsys)


def test_fetch_tells_scripts_where_the_model_lies() -> None:
    """With --json the answer is one object."""
    answer = json.loads(run("fetch", "--json").stdout)
    assert (Path(answer["dir"]) / "config.json").exists()
