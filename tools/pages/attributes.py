"""Fields of dataclasses with their types and meanings, read from the `Attributes` of docstrings and from comments."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass

_ENTRY = re.compile(r"^    (\w+): (.+)$")
_MORE = re.compile(r"^        +(\S.*)$")


@dataclass(frozen=True)
class Field:
    """Field of a dataclass.

    Attributes:
        type: Annotation, as it is written.
        meaning: Text of the docstring, else the comment on its line; empty without one.
    """

    type: str
    meaning: str


def fields_of(owner: type) -> dict[str, Field]:
    """Return the fields of a dataclass by name, in order."""
    lines = textwrap.dedent(inspect.getsource(owner)).splitlines()
    (tree,) = ast.parse("\n".join(lines)).body
    assert isinstance(tree, ast.ClassDef)
    told = documented(inspect.getdoc(owner) or "")
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert node.end_lineno is not None
            name, said = node.target.id, lines[node.end_lineno - 1].partition("  # ")[2]
            found[name] = Field(ast.unparse(node.annotation), told.get(name) or said)
    return found


def documented(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring's `Attributes`, by name."""
    texts: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        entry, more = _ENTRY.match(line), _MORE.match(line)
        if entry:
            name = entry[1]
            texts[name] = entry[2]
        elif more and name:
            texts[name] += f" {more[1]}"
        else:
            break
    return texts
