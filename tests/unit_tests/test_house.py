"""The limits of the house: sizes of files, functions and classes, and no `Any` where a caller looks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.unit_tests.support.source import ROOT, is_private, parse, python_files

LONGEST_FILE, LONGEST_FUNCTION, MAX_ATTRIBUTES = 360, 62, 22
FILES = [path for folder in ("arguments", "megatron_ext") for path in python_files(ROOT / folder)]
# Public names with `Any` in their signatures, by file, each with why nothing better can be said.
ANY = {
    "megatron_ext/text/vocabulary.py": {"Vocabulary.__init__": "a tokenizer of Megatron's too, which may lack names"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path) -> str:
    return str(path.relative_to(ROOT))


def annotations(function: Function) -> Iterator[ast.expr]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    yield from (one.annotation for one in every if one is not None and one.annotation is not None)
    if function.returns is not None:
        yield function.returns


def mentions_any(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation))


def public_any(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names of functions, methods and fields whose annotations mention `Any`."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not is_private(node.name):
            yield from public_any(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function) and not is_private(node.name):
            if any(mentions_any(one) for one in annotations(node)):
                yield prefix + node.name
        elif isinstance(node, ast.AnnAssign) and mentions_any(node.annotation):
            name = ast.unparse(node.target)
            if not is_private(name):
                yield prefix + name


def owned_attributes(node: ast.ClassDef) -> set[str]:
    """Fields, and what methods set on `self`; of the class itself, not of its bases."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stores = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return fields | {one.attr for one in stores if isinstance(one.value, ast.Name) and one.value.id == "self"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path):
    """A file of up to 350 lines, functions of up to 60; configuration may have as many fields as there are flags."""
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, node.name
        elif isinstance(node, ast.ClassDef) and "config" not in path.relative_to(ROOT).parts:
            assert len(owned_attributes(node)) <= MAX_ATTRIBUTES, node.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_public_signature_has_any(path):
    """Public signatures name their types; the exceptions are listed above, and none of them is stale."""
    assert set(public_any(parse(path).body)) == set(ANY.get(name_of(path), {}))


def test_the_checks_can_fail():
    source = """
class A:
    x: int
    y: "dict[str, Any]"
    _z: Any
    def __init__(self, a: Any) -> None:
        self.b = self.c = a
    def _hidden(self) -> Any: ...
async def f(*items: Any) -> None: ...
def g(x: int) -> list[Any]:
    value: Any = x
"""
    body = ast.parse(source).body
    assert list(public_any(body)) == ["A.y", "A.__init__", "f", "g"]
    assert owned_attributes(body[0]) == {"x", "y", "_z", "b", "c"}
