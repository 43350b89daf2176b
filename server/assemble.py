"""From configurations to a Hub: the one place that knows every part below the front."""

from hillstar.engine.config import EngineConfig
from hillstar.server.bridge import Bridge
from hillstar.server.config import ServerConfig
from hillstar.server.journal import Journal
from hillstar.server.ports import Observer
from hillstar.server.registry import Hub
from hillstar.server.text import Tokenizer


def assemble_hub(engine: EngineConfig, server: ServerConfig, observer: Observer) -> Hub:
    """A Hub that is not started yet; called on the event loop it will run on.

    Locks the data directory. Raises ConfigError (the directory is in use, or is not writable) and
    ValueError (the model's tokenizer cannot be read).
    """
    text = Tokenizer(engine.model_dir)
    return Hub(
        journal=Journal(server.data_dir, durability=server.durability),
        engine=Bridge(engine),
        text=text,
        observer=observer,
        model_name=engine.model_name,
        max_model_len=engine.max_model_len,
    )
