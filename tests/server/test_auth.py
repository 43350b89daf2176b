"""Keys to principals, and which pages may talk to the server."""

from pathlib import Path

import pytest

from hillstar.engine.config import ConfigError
from hillstar.server.auth import LOCAL, KeyRing, OriginPolicy, require_operator, subprotocols
from hillstar.server.errors import ApiError
from hillstar.server.ports import Principal


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_everybody_is_local_without_keys() -> None:
    """Without a key file every request is the operator of the tenant `local`."""
    ring = KeyRing(None)
    assert not ring.required
    assert ring.authenticate({}) == LOCAL


def test_keys_name_tenants(tmp_path: Path) -> None:
    """A line maps a key to its tenant; `operator` is a third word; comments are not keys."""
    ring = KeyRing(write(tmp_path / "keys", "# who\nacme k-1 # the app\n\nops k#2 operator\n"))
    assert ring.authenticate(bearer("k-1")) == Principal("acme")
    assert ring.authenticate({"Authorization": "bearer k#2"}) == Principal("ops", operator=True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("k-2"),
        bearer(""),
        {"Authorization": "Basic k-1"},
        {"Authorization": "k-1"},
        {"Sec-WebSocket-Protocol": "hillstar.v1.json"},
        {"Sec-WebSocket-Protocol": "hillstar-key.,hillstar-key.k-1"},
    ],
)
def test_wrong_or_missing_keys_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    """Anything but a known key answers 401 `invalid_api_key`."""
    ring = KeyRing(write(tmp_path / "keys", "acme k-1\n"))
    with pytest.raises(ApiError) as refusal:
        ring.authenticate(headers)
    assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")


def test_browsers_send_the_key_as_a_subprotocol(tmp_path: Path) -> None:
    """`hillstar-key.KEY` authenticates and is never among the subprotocols to select from."""
    ring = KeyRing(write(tmp_path / "keys", "acme k-1\n"))
    offered = "hillstar.v1.json, hillstar-key.k-1"
    assert ring.authenticate({"Sec-WebSocket-Protocol": offered}) == Principal("acme")
    assert subprotocols(offered) == ["hillstar.v1.json"]


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "acme\n", "acme k extra\n", "a k\nb k\n", "a k operator x\n"]
)
def test_malformed_files_are_refused_without_showing_keys(tmp_path: Path, text: str) -> None:
    """A key file with a wrong line is an error that names the line and not the key."""
    path = write(tmp_path / "keys", text)
    with pytest.raises(ConfigError) as refusal:
        KeyRing(path)
    assert str(path) in str(refusal.value)
    assert " k" not in str(refusal.value).replace(" key", "")


def test_reload_takes_new_keys_or_keeps_the_old(tmp_path: Path) -> None:
    """`reload` swaps all keys at once; a file that does not parse changes nothing."""
    path = write(tmp_path / "keys", "acme k-1\n")
    ring = KeyRing(path)
    write(path, "acme k-2\n")
    ring.reload()
    assert ring.authenticate(bearer("k-2")).tenant == "acme"
    with pytest.raises(ApiError):
        ring.authenticate(bearer("k-1"))
    write(path, "nonsense\n")
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.authenticate(bearer("k-2")).tenant == "acme"


def test_operators_alone_see_the_server() -> None:
    """A principal that is no operator is refused with 403."""
    require_operator(LOCAL)
    with pytest.raises(ApiError) as refusal:
        require_operator(Principal("acme"))
    assert refusal.value.status == 403


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        (None, "example.org", True),
        ("http://127.0.0.1:8040", "127.0.0.1:8040", True),
        ("http://localhost:8040", "localhost:8040", True),
        ("http://127.0.0.1:8041", "127.0.0.1:8040", False),
        ("https://chat.example.org", "127.0.0.1:8040", True),
        ("HTTPS://CHAT.example.org", "127.0.0.1:8040", True),
        ("https://chat.example.org.evil.net", "127.0.0.1:8040", False),
        ("null", "127.0.0.1:8040", False),
        ("", "", False),
        ("http://[", "127.0.0.1:8040", False),
        ("http://rebound.example.net:8040", "rebound.example.net:8040", False),
    ],
)
def test_own_and_listed_origins_pass(origin: str | None, host: str, allowed: bool) -> None:
    """A page passes if it is the server's own or listed; a name rebound to loopback does not."""
    policy = OriginPolicy(("https://chat.example.org",), loopback_only=True)
    assert policy.allows(origin, host) is allowed


def test_with_keys_any_name_of_ours_is_ours() -> None:
    """Where keys are asked, the page served under the request's own host passes."""
    policy = OriginPolicy((), loopback_only=False)
    assert policy.allows("https://hill.example.org", "hill.example.org")
    with pytest.raises(ApiError) as refusal:
        policy.check("https://other.example.org", "hill.example.org")
    assert refusal.value.status == 403


def test_a_star_allows_every_page() -> None:
    """`*` on the allow-list lets any origin in, `null` included."""
    policy = OriginPolicy(("*",), loopback_only=True)
    assert policy.allows("null", "x")
