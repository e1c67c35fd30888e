"""Limits on the sizes of files, functions and classes, and no `Any` in public signatures."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.unit_tests.support.source import ROOT, is_private, parse, python_files

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ATTRIBUTES = 400, 70, 22
# Classes with more attributes: lists of fields, which a reader wants to see in one place.
LISTS_OF_FIELDS = {
    "ModelFields": "the architecture of every model that can be built",
    "ModelConfig": "inherits them all",
    "RequestParams": "the options of a request",
    "CoordinatorConfig": "the settings of a coordinator, those of its keys inherited",
    "RequestRecord": "all that is reported of a request",
    "RunConfig": "all settings of an offline run",
    "SamplingFields": "the body of a request",
    "GenerationRequest": "inherits its fields",
    "CompletionRequest": "inherits its fields",
    "ChatRequest": "inherits its fields",
    "ResponsesRequest": "inherits its fields",
}
# Public names with `Any` in their signatures, by file, each with the reason why there is no better type.
ANY = {
    "megatron_ext/text/vocabulary.py": {"Vocabulary.__init__": "a tokenizer of Megatron's too, which may lack names"},
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    return [path for folder in ("arguments", "megatron_ext") for path in python_files(ROOT / folder)]


def module_of(path: Path) -> str:
    """Dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Fields, and what methods set on `self`; of the class itself, not of its bases."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stores = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return fields | {one.attr for one in stores if isinstance(one.value, ast.Name) and one.value.id == "self"}


class Classes:
    """Classes of modules, with their bases as far as these are classes of the same modules.

    Args:
        trees: Syntax trees by dotted module name.
    """

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._nodes = {
            (module, node.name): node
            for module, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }
        self._imported = {
            (module, alias.asname or alias.name): (node.module, alias.name)
            for module, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def attributes(self) -> dict[tuple[str, str], set[str]]:
        """Attributes of each class, inherited ones included, by module and name."""
        return {key: self._attributes_of(key) for key in self._nodes}

    def _attributes_of(self, key: tuple[str, str]) -> set[str]:
        key = self._imported.get(key, key)
        node = self._nodes.get(key)
        if node is None:
            return set()
        bases = [(key[0], ast.unparse(base)) for base in node.bases]
        return own_attributes(node).union(*(self._attributes_of(base) for base in bases))


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {module_of(path): parse(path) for path in files()}


def test_no_file_is_too_long():
    lengths = {module_of(path): len(path.read_text("utf-8").splitlines()) for path in files()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_function_is_too_long():
    lengths = {
        f"{module}.{node.name}": node.end_lineno - node.lineno + 1
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_no_class_has_too_many_attributes():
    """Inherited attributes count: splitting a class into bases does not make it smaller."""
    counts = {key: len(attributes) for key, attributes in Classes(trees()).attributes().items()}
    many = {key: count for key, count in counts.items() if count > MAX_ATTRIBUTES}
    assert {key: count for key, count in many.items() if key[1] not in LISTS_OF_FIELDS} == {}
    assert {name for _, name in many} == set(LISTS_OF_FIELDS), "these need no exception"


def test_no_public_signature_has_any():
    """Public signatures name their types; the exceptions are listed above, and none of them is stale."""
    found = {str(path.relative_to(ROOT)): set(public_any(parse(path).body)) for path in files()}
    assert {name: names for name, names in found.items() if names} == {name: set(why) for name, why in ANY.items()}


def test_the_checks_can_fail():
    source = """
from other import Base as Other
class A:
    x: int
    y: "dict[str, Any]"
    _z: Any
    def __init__(self, a: Any) -> None:
        self.b = self.c = a
    def _hidden(self) -> Any: ...
class B(A, Other, Unknown):
    d: int
async def f(*items: Any) -> None: ...
def g(x: int) -> list[Any]:
    value: Any = x
"""
    tree = ast.parse(source)
    assert list(public_any(tree.body)) == ["A.y", "A.__init__", "f", "g"]
    classes = Classes({"here": tree, "other": ast.parse("class Root:\n    e: int\nclass Base(Root):\n    f: int")})
    found = classes.attributes()
    assert found["here", "A"] == {"x", "y", "_z", "b", "c"}
    assert found["here", "B"] == {"x", "y", "_z", "b", "c", "d", "e", "f"}
