"""What a command says when it cannot go on: one line, no traceback."""

import sys


class CommandError(Exception):
    """The world is not as the command needs it; the message is one line for a person."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def report(message: str) -> None:
    """Write `hillstar: error: MESSAGE` to standard error, as exactly one line."""
    print(f"hillstar: error: {' '.join(message.split())}", file=sys.stderr)
