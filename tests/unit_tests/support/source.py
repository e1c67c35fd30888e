"""Reading our own source: which private names and which modules a file uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "megatron_ext"
_ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr"}


def python_files(folder: Path) -> list[Path]:
    """All of a folder, in order; or the file itself."""
    return [folder] if folder.is_file() else sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def is_private(name: str) -> bool:
    """_x and __x, but neither _ nor __x__."""
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every private attribute that is read, set or asked for by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ATTRIBUTE_FUNCTIONS:
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield node.lineno, name.value


def private_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every private name or module that is imported from somewhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name) or any(is_private(part) for part in (node.module or "").split(".")):
                    yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(is_private(part) for part in alias.name.split(".")):
                    yield alias.name, ""


def defined_attributes(tree: ast.AST) -> set[str]:
    """Names that become attributes here: methods, class variables and fields, and what methods set on `self`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(member.name)
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    names.add(member.target.id)
                elif isinstance(member, ast.Assign):
                    names.update(target.id for target in member.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, however deep, without their expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from statements(child)


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full dotted names; `from a import b` counts as a.b as well as a."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
