"""A model's own sampling defaults: where they come from and when they apply."""

import json
from pathlib import Path

import aiohttp
import pytest

from hillstar.engine.config import ConfigError
from hillstar.server.defaults import NO_DEFAULTS, ModelDefaults, read_defaults
from hillstar.server.request import CreateResponse, parse_create
from support.server import fake_hub_server
from support.socket_client import connect

MODELS = ModelDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.1)


def test_the_models_file_is_read(tmp_path: Path) -> None:
    """Five values are taken, null is none, and what else the file says is passed over."""
    assert read_defaults(tmp_path) == NO_DEFAULTS
    table = {"do_sample": True, "eos_token_id": [1, 2], "top_k": None, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(table))
    assert read_defaults(tmp_path) == NO_DEFAULTS
    given = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    given |= {"min_p": 0.01, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(table | given))
    assert read_defaults(tmp_path) == MODELS


@pytest.mark.parametrize(
    "text", ["", "[]", '{"temperature": 3}', '{"top_k": "many"}', '{"top_p": 0}', "\xff"]
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    """A wrong value is a wrong setting: one line with the file and what is wrong with it."""
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"generation_config\.json") as refusal:
        read_defaults(tmp_path)
    assert "\n" not in str(refusal.value)


def test_they_apply_to_what_is_not_stated() -> None:
    """Absent and null take the model's value, anything stated stays, the API's default too."""

    def parsed(**body: object) -> CreateResponse:
        return parse_create({"input": "x", **body}, surface="http", defaults=MODELS)

    bare = parsed(temperature=None, hillstar={"top_k": None})
    assert (bare.temperature, bare.top_p) == (0.6, 0.95)
    options = bare.hillstar
    assert (options.top_k, options.min_p, options.repetition_penalty) == (20, 0.01, 1.1)
    assert parsed() == bare
    neutral = {"top_k": 0, "min_p": 0, "repetition_penalty": 1}
    stated = parsed(temperature=1, top_p=1, hillstar=neutral)
    assert stated == parse_create({"input": "x"}, surface="http")


async def test_both_surfaces_apply_them() -> None:
    """What a response shows and the Hub is given is the same over HTTP and on a socket."""
    async with (
        fake_hub_server() as running,
        connect(running.socket_url) as client,
        aiohttp.ClientSession() as http,
    ):
        running.front.defaults = MODELS
        await client.response(input="x", temperature=0.2)
        async with http.post(f"{running.url}/v1/responses", json={"input": "x"}) as reply:
            assert reply.status == 200
        creates = [request for name, request in running.hub.calls if name == "create"]
        assert [request.temperature for request in creates] == [0.2, 0.6]
        assert [request.hillstar.top_k for request in creates] == [20, 20]
