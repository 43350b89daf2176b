"""Validation shared by every body and frame: decoding, typed conversion, errors that name things.

What arrives is anybody's bytes. Each function here raises ApiError and nothing else.
"""

import re
from typing import Any, TypeVar

import msgspec

from hillstar.server.errors import ApiError, invalid, unknown_parameter
from hillstar.server.flood import refuse_json_flood, refuse_msgpack_flood

T = TypeVar("T")

_MAX_SHOWN = 64  # characters of a client's value in a message
_LOCATED = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$?\.?(?P<path>[^`]*)`)?$", re.S)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.S)


def decode_json(data: str | bytes) -> object:
    """JSON text to plain values (str keys, no NaN, no lone surrogates)."""
    refuse_json_flood(data)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _malformed("JSON", error) from None


def decode_msgpack(data: bytes) -> object:
    """Msgpack to plain values. Timestamps and extension types are refused where they matter."""
    refuse_msgpack_flood(data)
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise _malformed("msgpack", error) from None


def decode_object(data: str | bytes) -> dict[str, Any]:
    """The JSON object of an HTTP body."""
    value = decode_json(data)
    if not isinstance(value, dict):
        raise invalid(f"The body must be an object, not {kind_of(value)}.", code="invalid_type")
    return value


def convert(value: object, to: type[T], prefix: str = "") -> T:
    """`msgspec.convert`, its complaint as an ApiError about `prefix` + the field's path."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        raise _located(str(error), value, to, prefix) from None
    except RecursionError:
        raise invalid("The value is nested too deeply.", prefix or None) from None


def wrong_type(param: str, value: object, expected: str) -> ApiError:
    return invalid(f"'{param}' must be {expected}, not {kind_of(value)}.", param, "invalid_type")


def missing(param: str) -> ApiError:
    return invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def shown(value: object) -> str:
    """A client's value, short enough and printable, for a message."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: _MAX_SHOWN + 1].encode("utf-8", "replace").decode()
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def kind_of(value: object) -> str:
    """JSON's name for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else "binary data"


def _malformed(what: str, error: Exception) -> ApiError:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else shown(str(error))
    return invalid(f"The request is not valid {what}: {why}.", code=f"invalid_{what.lower()}")


def _located(complaint: str, value: object, to: object, prefix: str) -> ApiError:
    """From msgspec's "Expected … - at `$.a.b[2]`" to an error with `param` a.b[2]."""
    match = _LOCATED.match(complaint)
    assert match is not None
    what, path = match["what"], match["path"] or ""
    unknown = _UNKNOWN.match(what)
    if unknown is not None:
        return unknown_parameter(prefix + ".".join(filter(None, (path, shown(unknown["name"])))))
    param = (prefix + path).removesuffix(".") or None
    where = f"'{param}'" if param else "The value"
    if what.startswith("Invalid enum value"):
        allowed = ", ".join(repr(choice) for choice in _choices(to, path))
        return invalid(f"{where} is {_found(value, path)}; allowed: {allowed}.", param)
    if match["key"]:
        return invalid(f"{where} has a bad key: {_lower(what)}.", param)
    if "got `" in what:
        return invalid(f"{where}: {_lower(what)}.", param, "invalid_type")
    return invalid(f"{where} is {_found(value, path)}; {_lower(what)}.", param)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _choices(to: object, path: str) -> tuple[object, ...]:
    """The values that the literal type at `path` allows."""
    info = msgspec.inspect.type_info(to)
    for name in path.split("."):
        assert isinstance(info, msgspec.inspect.StructType)
        info = next(field.type for field in info.fields if field.encode_name == name)
        if isinstance(info, msgspec.inspect.UnionType):  # "… or null"
            info = info.types[0]
    assert isinstance(info, msgspec.inspect.LiteralType)
    return info.values


def _found(value: object, path: str) -> str:
    """The offending value, found by its path (`a.b[2]`; a map's values are `[...]`)."""
    for name in re.findall(r"\.\.\.|[^.\[\]]+", path):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return "not as it must be"
    if isinstance(value, str):
        return repr(shown(value))
    return shown(value) if isinstance(value, int | float) else kind_of(value)
