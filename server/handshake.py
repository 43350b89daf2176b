"""The opening handshake of a WebSocket (RFC 6455, 4.2), refused with a type where it is none.

aiohttp also takes the drafts' versions 7 and 8, and answers a bad key in plain text. What it takes
and cannot be told to refuse are unmasked frames (5.1): its compiled reader has no setting for
that and shows the mask bit to nobody. Masking protects proxies from pages in a browser, which
cannot send such frames; nothing here depends on it.
"""

import base64
import binascii

from aiohttp import web

from hillstar.server.errors import ApiError

VERSION = "13"


def check_handshake(request: web.Request) -> None:
    """Raise ApiError for a request that opens no WebSocket of this version."""
    headers = request.headers
    if headers.get("Upgrade", "").strip().lower() != "websocket":
        raise ApiError(426, "upgrade_required", "This is a WebSocket, or POST a response here.")
    if headers.get("Sec-WebSocket-Version", "").strip() != VERSION:
        raise ApiError(
            426, "unsupported_websocket_version", f"Only version {VERSION} of WebSocket is spoken."
        )
    try:
        key = base64.b64decode(headers.get("Sec-WebSocket-Key", ""), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 16:
        raise ApiError(400, "invalid_http", "'Sec-WebSocket-Key' is not base64 of 16 bytes.")
