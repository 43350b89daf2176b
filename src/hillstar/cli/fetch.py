"""`hillstar fetch`: bring a model onto this machine, ready to serve."""

import argparse
import json

from hillstar.cli import values
from hillstar.cli.options import FETCH
from hillstar.cli.progress import progress_bar
from hillstar.cli.report import CommandError
from hillstar.cli.settings import resolve
from hillstar.engine.models.errors import ModelError
from hillstar.engine.models.fetch import resolve_model


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model and print where it lies."""
    settings = resolve(FETCH, arguments)
    data_dir = settings["data_dir"] or values.default_data_dir()
    title = f"fetching {arguments.model or 'the built-in model'}"
    try:
        with progress_bar(title) as progress:
            model = resolve_model(arguments.model, data_dir / "models", progress)
    except ModelError as error:
        raise CommandError(str(error)) from None
    if arguments.json:
        print(json.dumps({"name": model.name, "dir": str(model.dir)}))
    else:
        print(f"{model.name}: {model.dir}")
    return 0
