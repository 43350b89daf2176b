"""The model's chat template: messages in, prompt text out.

Templates are Jinja programs that come with a model. They run in a sandbox, in the environment that
transformers gives them (`raise_exception`, `strftime_now`, a `tojson` that keeps Unicode, loop
controls, blocks trimmed), so that they write what they were written to write.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatMessage(TypedDict):
    """A message as templates know it."""

    role: str
    content: str


class TemplateRefusal(Exception):
    """The template does not take these messages; the message says why."""


class ChatTemplate:
    """A compiled template. Immutable; `render` may run in any thread."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """special_tokens: `bos_token`, `eos_token`, … as text. Raises ValueError for bad syntax."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has an error: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The prompt's text, special tokens included. Raises TemplateRefusal."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateRefusal(str(error)) from error


def load_template(model_dir: Path) -> ChatTemplate:
    """The template of a model folder: `chat_template.jinja`, or in `tokenizer_config.json`.

    Raises ValueError if there is none.
    """
    config_file = model_dir / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
    own_file = model_dir / "chat_template.jinja"
    if own_file.is_file():
        source: Any = own_file.read_text(encoding="utf-8")
    else:
        source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{model_dir} has no chat template: it is not a model for conversations")
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
