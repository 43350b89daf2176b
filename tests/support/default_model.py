"""The default model, where the command line keeps it."""

from hillstar.cli.values import default_data_dir
from hillstar.engine.models.fetch import ResolvedModel, resolve_model


def default_model() -> ResolvedModel:
    """SmolLM2-135M-Instruct, fetched (once a machine) when `hillstar fetch` has not run."""
    return resolve_model(None, default_data_dir() / "models")
