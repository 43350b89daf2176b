"""What can go wrong for a client.

ClientError              retryable: the same call may succeed later
 ├─ RequestRefused       the server said no, with a code of docs/protocol.md
 ├─ HandshakeRefused     the server answered the connection attempt with an HTTP error
 ├─ ConnectionLostError  the socket closed for good, or the time to reconnect ran out
 ├─ EventsLost           the server no longer has the events after the last one seen
 ├─ ProtocolError        the server broke the protocol
 └─ ClientClosed         the client was closed while a stream was open
"""

from collections.abc import Mapping
from typing import Any

_RETRYABLE_STATUS = frozenset({429, 502, 503, 504})


class ClientError(Exception):
    """Base of this package's errors. `retryable`: the same call may succeed later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class RequestRefused(ClientError):
    """A typed refusal of one request; other streams are not disturbed."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{code}: {message}", retryable=status in _RETRYABLE_STATUS)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @classmethod
    def from_body(cls, status: int, body: object) -> "RequestRefused":
        """From an error frame or an HTTP error's body, whatever a proxy has made of it."""
        error = body.get("error") if isinstance(body, Mapping) else None
        fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
        return cls(
            status,
            str(fields.get("code") or fields.get("type") or "error"),
            str(fields.get("message") or "no message"),
            fields.get("param"),
        )


class HandshakeRefused(ClientError):
    """The upgrade was answered with an HTTP status instead of a socket."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, retryable=status in _RETRYABLE_STATUS)
        self.status = status


class ConnectionLostError(ClientError):
    """There is no connection and none is attempted any more.

    close_code is the socket's, or None where no connection came about.
    """

    def __init__(self, message: str, *, close_code: int | None, retryable: bool) -> None:
        super().__init__(message, retryable=retryable)
        self.close_code = close_code


class EventsLost(ClientError):
    """The server answered a resume with `recovered: false`: read the response as a whole."""


class ProtocolError(ClientError):
    """A frame that the protocol does not allow."""


class ClientClosed(ClientError):
    """The client was closed."""
