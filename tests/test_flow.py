"""Packages import one way only, and torch where it belongs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import flipper

ROOT = Path(flipper.__file__).parent

ORDER = ("bits", "checkpoints", "faults", "injection", "mesh", "training", "statistics", "failstop", "campaigns",
         "report", "study", "cli")  # fmt: skip
"""Each imports only from itself and from those before it."""

SHARED = ("errors", "strict_json", "text_files", "toml")
"""Modules at the top that all may import; they import nothing of flipper but each other."""

WITH_TORCH = ("training", "failstop", "study", "injection/memory.py")


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imported(path: Path) -> Iterator[str]:
    """All modules that a file imports, wherever in it; not those that only a type checker sees."""
    tree = ast.parse(path.read_text("utf-8"))
    for_types = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and ast.unparse(guard.test) == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_from_its_own_package_and_those_before_it(path: Path) -> None:
    mine = path.relative_to(ROOT).parts[0]
    allowed = ORDER[: ORDER.index(mine) + 1]
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "flipper" and len(parts) > 1 and (ROOT / parts[1]).is_dir():
            assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_what_all_share_imports_none_of_the_packages() -> None:
    for name in SHARED:
        found = [module for module in imported(ROOT / f"{name}.py") if module.startswith("flipper.")]
        assert all(module.split(".")[1] in SHARED for module in found), name


def test_torch_is_imported_where_training_is() -> None:
    for path in modules():
        where = path.relative_to(ROOT).as_posix()
        if any(name.split(".")[0] == "torch" for name in imported(path)):
            assert where.startswith(WITH_TORCH), f"{where} imports torch"
