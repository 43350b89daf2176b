"""How a model's makers would have it sampled: what a create gets where it states nothing else.

A Hugging Face folder may say so in `generation_config.json`. The values become part of the
request before it is stored, so an answer goes on in the same way whatever the file says later.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hillstar.engine.config import ConfigError

FILE = "generation_config.json"

Temperature = Annotated[float, Meta(ge=0, le=2)]  # 0 = greedy
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]  # 0 = off
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]


class ModelDefaults(msgspec.Struct, frozen=True):
    """Values by the names that the file and a create share. None: the API's own default."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None

    def fill(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A create's fields, without nulls, and what they do not state."""
        options = fields.get("hillstar", {})
        if isinstance(options, dict):
            options = self._stated("top_k", "min_p", "repetition_penalty") | options
        return self._stated("temperature", "top_p") | fields | {"hillstar": options}

    def _stated(self, *names: str) -> dict[str, float]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


NO_DEFAULTS = ModelDefaults()


def read_defaults(model_dir: Path) -> ModelDefaults:
    """What the folder's file says of these; whatever else it says is passed over.

    Raises ConfigError for a file that cannot be used.
    """
    path = model_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelDefaults)
    except FileNotFoundError:
        return NO_DEFAULTS
    except (OSError, UnicodeError, msgspec.DecodeError) as error:
        raise ConfigError(FILE, str(path), f"usable values: {error}") from None
