"""Query strings: known names with values of a type, everything else refused by name."""

from collections.abc import Collection, Mapping

from hillstar.server.errors import invalid, unknown_parameter
from hillstar.server.validate import shown


def check_names(query: Mapping[str, str], known: Collection[str]) -> None:
    """Raises ApiError for the first parameter that is not among `known`."""
    for name in query:
        if name not in known:
            raise unknown_parameter(shown(name))


def boolean(query: Mapping[str, str], name: str) -> bool:
    """`true` or `false`; False where it is absent. Raises ApiError."""
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise invalid(f"'{name}' is {shown(value)!r}; true or false is allowed.", name)
    return value == "true"


def integer(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """A whole number from `low` to `high`; None where it is absent. Raises ApiError."""
    value = query.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 19:
        number = None
    else:
        number = int(value)
    if number is None or not low <= number <= high:
        raise invalid(
            f"'{name}' is {shown(value)!r}; a whole number from {low} to {high} is allowed.", name
        )
    return number


def choice(query: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """One of `allowed`; the first where it is absent. Raises ApiError."""
    value = query.get(name, allowed[0])
    if value not in allowed:
        raise invalid(f"'{name}' is {shown(value)!r}; one of {', '.join(allowed)} is.", name)
    return value
