"""What the documents promise is what the code does."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hillstar.cli.options import SERVE

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(r"[a-z]+(_[a-z]+)+")

# Which argument of each constructor is the wire code.
CODE_ARGUMENT = {"ApiError": 1, "conflict": 0, "invalid": 2}


def wire_codes() -> Iterator[str]:
    """The codes that the server's source gives to errors, as literals."""
    for path in (ROOT / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            index = CODE_ARGUMENT.get(node.func.id)
            if index is None:
                continue
            given = node.args[index : index + 1] + [
                keyword.value for keyword in node.keywords if keyword.arg == "code"
            ]
            for argument in given:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def documented_codes() -> set[str]:
    """The codes in the first column of the protocol's table of errors."""
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = text.partition("## Errors")[2].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    return {code for cell in cells for code in re.findall(r"`([a-z_]+)`", cell)}


def test_every_error_code_is_documented() -> None:
    """A code that a client may see is in docs/protocol.md, with what to do about it."""
    codes = set(wire_codes())
    assert len(codes) > 20
    assert all(CODE.fullmatch(code) for code in codes), codes
    assert codes <= documented_codes(), f"not documented: {sorted(codes - documented_codes())}"


def test_the_map_names_every_module() -> None:
    """docs/architecture.md's map has each module under its folder, and none that is not there."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("```\n")[2].partition("```")[0]
    _, *parts = re.split(r"^([a-z/]+)/(?=\s)", block, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(sections) == {"clients", "server", "engine", "kernels", "src/hillstar"}
    for folder, section in sections.items():
        named = {Path(name).name for name in re.findall(r"[\w/]+\.py", section)}
        if folder == "kernels":  # there a file is named for what its kernel computes
            assert not named
            continue
        files = {path.name for path in (ROOT / folder).rglob("*.py")} - {"__init__.py"}
        assert named == files, f"{folder}: {sorted(named ^ files)}"


def test_every_setting_of_serve_is_in_the_readme() -> None:
    """The README's table of settings is complete and names none that does not exist."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `--([a-z-]+)`", text, re.MULTILINE))
    assert named == {setting.name for setting in SERVE} | {"config"}
