"""No `Any` in public signatures."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit_tests.support.source import ROOT, is_private, parse, python_files

# Public names with `Any` in their signatures, by file, each with the reason why there is no better type.
ANY = {
    "megatron_ext/text/vocabulary.py": {"Vocabulary.__init__": "a tokenizer of Megatron's too, which may lack names"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def test_no_public_signature_has_any():
    """Public signatures name their types; the exceptions are listed above, and none of them is stale."""
    files = [path for folder in ("arguments", "megatron_ext") for path in python_files(ROOT / folder)]
    found = {str(path.relative_to(ROOT)): set(public_any(parse(path).body)) for path in files}
    assert {name: names for name, names in found.items() if names} == {name: set(why) for name, why in ANY.items()}


def test_the_check_can_fail():
    source = """
class A:
    x: int
    y: "dict[str, Any]"
    _z: Any
    def __init__(self, a: Any) -> None: ...
    def _hidden(self) -> Any: ...
async def f(*items: Any) -> None: ...
def g(x: int) -> list[Any]:
    value: Any = x
"""
    assert list(public_any(ast.parse(source).body)) == ["A.y", "A.__init__", "f", "g"]
