"""Whether anything listens where a server is said to be."""

import socket
from urllib.parse import urlsplit

from hillstar.cli.report import CommandError

TIMEOUT_S = 5.0


def require_server(url: str) -> None:
    """Return if `url` takes connections. Raises CommandError, at once where nothing listens.

    Only at the start of a command: a server that was there and goes away is waited for.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise CommandError(
            f"no server answers at {url} ({reason}); `hillstar serve` starts one, "
            "`--url` names another"
        ) from None
