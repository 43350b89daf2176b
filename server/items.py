"""Input items: the `input` of a create as messages.

Text messages in every shape OpenAI's clients send them: a bare string, messages with or without
`type`, content as a string or as parts. Anything else is refused by name.
"""

from typing import Any, Literal

import msgspec

from hillstar.server.errors import ApiError, invalid, unknown_parameter, unsupported_parameter
from hillstar.server.validate import missing, shown, wrong_type

Role = Literal["system", "developer", "user", "assistant"]


class Message(msgspec.Struct, frozen=True):
    """One input message: its role and the texts of its content parts, in order."""

    role: Role
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        """What the chat template sees: the parts, a line each."""
        return "\n".join(self.parts)


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}
_MESSAGE_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
# What our own items carry when a client sends an output item back; none of it changes the text.
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
MAX_PARTS = 4096  # of all messages of one input
_TEXT_PARTS = ("input_text", "output_text", "text")


def parse_input(value: object) -> tuple[Message, ...]:
    """The messages of an `input` field. Raises ApiError that names the item and the field."""
    if isinstance(value, str):
        return (Message("user", (value,)),)
    if not isinstance(value, list | tuple):
        raise wrong_type("input", value, "a string or an array of items")
    _check_length("input", len(value))
    messages = []
    num_parts = 0
    for i, item in enumerate(value):
        message = _message(item, f"input[{i}]")
        num_parts += len(message.parts)
        _check_length(f"input[{i}].content", num_parts)
        messages.append(message)
    return tuple(messages)


def _check_length(where: str, length: int) -> None:
    """Bound the work that one frame can ask of the event loop."""
    if length > MAX_PARTS:
        raise invalid(f"'{where}' makes {length} parts in all; at most {MAX_PARTS}.", where)


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise wrong_type(where, item, "an object")
    kind = item.get("type", "message")
    if kind != "message":
        if not isinstance(kind, str):
            raise wrong_type(f"{where}.type", kind, "a string")
        raise unsupported_parameter(f"{where}.type", f"{shown(kind)!r}; only 'message' items are")
    for name in item:
        if name not in _MESSAGE_FIELDS:
            raise unknown_parameter(f"{where}.{shown(name)}")
    for name in ("role", "content"):
        if item.get(name) is None:
            raise missing(f"{where}.{name}")
    role = _ROLES.get(item["role"]) if isinstance(item["role"], str) else None
    if role is None:
        raise invalid(
            f"'{where}.role' is {shown(item['role'])!r}; allowed: {', '.join(map(repr, _ROLES))}.",
            f"{where}.role",
        )
    return Message(role, _parts(item["content"], f"{where}.content"))


def _parts(content: object, where: str) -> tuple[str, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list | tuple):
        raise wrong_type(where, content, "a string or an array of content parts")
    _check_length(where, len(content))
    return tuple(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, part, "an object")
    kind = part.get("type")
    if kind is None:
        raise missing(f"{where}.type")
    if kind not in _TEXT_PARTS:
        raise _unsupported_part(kind, where)
    for name in part:
        if name not in _PART_FIELDS:
            raise unknown_parameter(f"{where}.{shown(name)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise (
            missing(f"{where}.text")
            if text is None
            else wrong_type(f"{where}.text", text, "a string")
        )
    return text


def _unsupported_part(kind: object, where: str) -> ApiError:
    if not isinstance(kind, str):
        return wrong_type(f"{where}.type", kind, "a string")
    return unsupported_parameter(
        f"{where}.type", f"{shown(kind)!r}; only 'input_text' and 'output_text' are"
    )
