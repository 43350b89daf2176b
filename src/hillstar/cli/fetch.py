"""`hillstar fetch`: bring a model onto this machine, ready to serve."""

import argparse
import json
from pathlib import Path

from hillstar.cli import values
from hillstar.cli.options import FETCH
from hillstar.cli.progress import progress_bar
from hillstar.cli.report import CommandError
from hillstar.cli.settings import resolve
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.fetch import DEFAULT_MODEL, has_default_model, resolve_model


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model and print where it lies."""
    settings = resolve(FETCH, arguments)
    cache_dir = cache_dir_for(arguments.model, settings["data_dir"])
    title = f"fetching {arguments.model or 'the built-in model'}"
    try:
        with progress_bar(title) as progress:
            model = resolve_model(arguments.model, cache_dir, progress)
    except ModelError as error:
        raise CommandError(str(error)) from None
    if arguments.json:
        print(json.dumps({"name": model.name, "dir": str(model.dir)}))
    else:
        print(f"{model.name}: {model.dir}")
    return 0


def cache_dir_for(name: str | None, data_dir: Path | None) -> Path:
    """Where a model is looked for and kept: in the data directory.

    The built-in model is taken from the user's own data directory where it is ready there, so
    that a server with a data directory of its own does not fetch it again.
    """
    own = values.default_data_dir() / "models"
    is_built_in = name is None or name == DEFAULT_MODEL
    if data_dir is None or (is_built_in and has_default_model(own)):
        return own
    return data_dir / "models"
