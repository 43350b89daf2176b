"""The arrows of docs/architecture.md, kept true: who may import whom.

Imports are read from the syntax tree, so that one inside a function or under TYPE_CHECKING counts
like any other: an import that must hide there means that a type lives one layer too high.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "engine", "kernels", "clients")

# From a package to what it may import of the others: whole packages or single modules.
ARROWS: Mapping[str, Sequence[str]] = {
    "clients": ("server.wire",),
    "server": ("engine.messages", "engine.config"),
    "engine": ("kernels",),
    "kernels": (),
}

# What single modules may import besides: the bridge speaks the engine's frames on the socket.
EXTRA_ARROWS: Mapping[str, Sequence[str]] = {"server.bridge": ("engine.framing",)}

# Inside the engine, top to bottom; a module that is not named belongs to the layer of "*".
# An import goes down or stays within its layer.
ENGINE_LAYERS: Sequence[Sequence[str]] = (
    ("main",),
    ("assembly",),
    ("loop",),
    ("scheduler", "batch", "runner"),
    ("*",),
    ("sequence", "tokens", "plan", "messages", "config"),
)
# The stages of a step know each other's values (engine.plan), not each other.
STAGES = ("engine.scheduler", "engine.batch", "engine.runner")


def module_files() -> dict[str, Path]:
    """Every module's name without `hillstar.`, and its file."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    base = ROOT / "src" / "hillstar"
    own = [*base.glob("*.py"), *(base / "cli").rglob("*.py")]
    return files | {".".join(p.relative_to(base).with_suffix("").parts): p for p in own}


def import_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import; `from a import b` yields `a.b`, relative ones a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def graph(files: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """module -> the modules of Hillstar it imports, each with a line that does."""
    edges: dict[str, dict[str, int]] = {}
    for module, path in files.items():
        targets = edges.setdefault(module, {})
        for line, name in import_names(ast.parse(path.read_text(encoding="utf-8"))):
            inner = name.removeprefix("hillstar.")
            if inner == name:
                continue
            target = inner if inner in files else inner.rpartition(".")[0]
            if target in files and target != module:
                targets.setdefault(target, line)
    return edges


def package_of(module: str) -> str:
    return module.partition(".")[0]


def is_within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def engine_layer(module: str) -> int:
    """The layer's index, 0 = top."""
    short = module.removeprefix("engine.")
    named = [i for i, layer in enumerate(ENGINE_LAYERS) if short in layer]
    return named[0] if named else next(i for i, layer in enumerate(ENGINE_LAYERS) if "*" in layer)


def violation(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None where it may."""
    source, goal = package_of(module), package_of(target)
    if source not in ARROWS:
        return None  # the command line sits on top of everything
    if goal not in ARROWS:
        return "only the command line may import the command line"
    if source != goal:
        allowed = (*ARROWS[source], *EXTRA_ARROWS.get(module, ()))
        if any(is_within(target, name) for name in allowed):
            return None
        return f"{source} may import of the others only {', '.join(ARROWS[source]) or 'nothing'}"
    if source == "engine":
        if engine_layer(target) < engine_layer(module):
            layers = " > ".join("/".join(layer) for layer in ENGINE_LAYERS)
            return f"that is up, against the engine's layers {layers}"
        if module in STAGES and target in STAGES:
            return "the stages of a step exchange values and do not know each other"
    return None


def find_cycle(edges: Mapping[str, Mapping[str, int]]) -> list[str] | None:
    """The modules of one import cycle in order, the first repeated at the end."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for target in edges.get(module, ()):
            if cycle := visit(target, [*path, module]):
                return cycle
        done.add(module)
        return None

    return next((cycle for module in edges if (cycle := visit(module, []))), None)


def test_imports_follow_the_arrows() -> None:
    """No module imports against docs/architecture.md, from whatever place in its file."""
    files = module_files()
    wrong = [
        f"{files[module].relative_to(ROOT)}:{line} imports hillstar.{target}: {reason}"
        for module, targets in graph(files).items()
        for target, line in targets.items()
        if (reason := violation(module, target))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    """The import graph has no cycle."""
    cycle = find_cycle(graph(module_files()))
    assert cycle is None, "import cycle: " + " -> ".join(cycle or ())


def test_imports_are_absolute_and_name_hillstar() -> None:
    """No relative import, and none that takes a folder of ours for a top-level package."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in module_files().values()
        for line, name in import_names(ast.parse(path.read_text(encoding="utf-8")))
        if name.startswith(".") or package_of(name) in PACKAGES
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_package_declares_what_it_imports() -> None:
    """pyproject.toml's dependencies are the distributions that the package imports, no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [re.match(r"[\w-]+", line) for line in project["dependencies"]]
    declared = {_normal(found[0]) for found in requirements if found}
    modules = {
        package_of(name)
        for path in module_files().values()
        for _, name in import_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    foreign = modules - set(sys.stdlib_module_names) - {"hillstar"}
    distributions = packages_distributions()
    imported = {_normal(distributions.get(name, [name])[0]) for name in foreign}
    assert imported == declared


def _normal(distribution: str) -> str:
    """A distribution's name as the Python index compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_four_folders_are_reached_through_links_and_are_no_packages_of_their_own() -> None:
    """`server`, `engine`, `kernels` and `clients` are importable under `hillstar` only."""
    for package in PACKAGES:
        link = ROOT / "src" / "hillstar" / package
        assert link.is_symlink(), f"{link} is no link"
        assert link.readlink() == Path("..") / ".." / package
        assert not list((ROOT / package).rglob("__init__.py")), f"{package} has an __init__.py"


@pytest.mark.parametrize(
    ("module", "target", "allowed"),
    [
        ("clients.client", "server.wire", True),
        ("clients.client", "server.events", False),
        ("server.bridge", "engine.messages", True),
        ("server.bridge", "engine.framing", True),
        ("server.session", "engine.framing", False),
        ("server.bridge", "engine.loop", False),
        ("engine.runner", "kernels.norm", True),
        ("engine.kv.block", "server.errors", False),
        ("engine.kv.block", "engine.scheduler", False),
        ("engine.scheduler", "engine.kv.block", True),
        ("engine.scheduler", "engine.runner", False),
        ("engine.messages", "engine.kv.block", False),
        ("kernels.norm", "engine.plan", False),
        ("server.app", "cli.serve", False),
        ("__main__", "engine.models.fetch", True),
    ],
)
def test_the_rules_tell_right_from_wrong(module: str, target: str, allowed: bool) -> None:
    """Each arrow lets through what it should and nothing else."""
    assert (violation(module, target) is None) == allowed


def test_imports_in_functions_and_for_type_checkers_count() -> None:
    """Every import statement of a file is seen, wherever it stands."""
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from hillstar.engine import loop
def late() -> None:
    import hillstar.engine.runner
from .sibling import thing
"""
    names = {name for _, name in import_names(ast.parse(source))}
    assert {"hillstar.engine.loop", "hillstar.engine.runner", ".sibling.thing"} <= names


def test_a_cycle_is_found_and_named() -> None:
    """The cycle's modules are told in order."""
    edges = {"a": {"b": 1}, "b": {"c": 1}, "c": {"b": 1}, "d": {}}
    assert find_cycle(edges) == ["b", "c", "b"]
