"""`hillstar chat`: talk to a running server."""

import argparse
import os
import sys

from hillstar.cli.options import CHAT, KEY_VARIABLE
from hillstar.cli.reach import require_server
from hillstar.cli.report import CommandError
from hillstar.cli.settings import resolve
from hillstar.clients.chat import ChatConfig, ask_once, run_chat
from hillstar.clients.errors import ClientError


def run(arguments: argparse.Namespace) -> int:
    """Chat in the terminal; or answer standard input where that is no terminal."""
    settings = resolve(CHAT, arguments)
    settings["key"] = settings["key"] or os.environ.get(KEY_VARIABLE)
    config = ChatConfig(**settings)
    require_server(config.url)
    try:
        if sys.stdin.isatty():
            run_chat(config)
        elif question := sys.stdin.read().strip():
            ask_once(config, question)
    except ClientError as error:
        raise CommandError(str(error)) from None
    return 0
