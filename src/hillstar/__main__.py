"""The command line: `hillstar` and `python -m hillstar`.

Only the parser is imported at once; each command imports what it needs when it runs, so that
`hillstar --help` answers immediately. A fault of the world (a wrong value, a missing file, a
server that is not there) is one line on standard error; a traceback is always a bug of ours.

Exit codes: 0 done · 1 the work failed · 2 a wrong value on the command line or in a file ·
130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from hillstar.cli.options import build_parser
from hillstar.cli.report import CommandError, report
from hillstar.engine.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        parser = build_parser()
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help()
            return 2
        return _run(arguments)
    except ConfigError as error:
        report(str(error))
        return 2
    except CommandError as error:
        report(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "serve":
            from hillstar.cli.serve import run
        case "chat":
            from hillstar.cli.chat import run
        case "bench":
            from hillstar.cli.bench import run
        case "fetch":
            from hillstar.cli.fetch import run
        case "size":
            from hillstar.cli.size import run
        case name:
            raise AssertionError(f"no command {name!r}")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
