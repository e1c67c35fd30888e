#!/usr/bin/env python
"""Check that docstrings start with a noun or an imperative verb, and do not speak of things as people.

Modules, classes and functions have docstrings; strings that follow an assignment are docstrings, too. Each one that
breaks a rule is printed as `path:line: rule: text`. Exit status: 0 without findings, 1 with some, 2 for a path that
does not exist.

    python tools/check_docstrings.py [PATH ...]     (default: megatron_ext, arguments and tools)
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DEFAULT_PATHS = ("megatron_ext", "arguments", "tools")
# After such a first word the reader has to guess the subject.
QUESTIONS = "How What Whatever When Where Whether Which Who Whoever Whom Whose Why"
PRONOUNS = "Anything He Her Hers His It Its Mine Nothing Others Ours She Their Theirs Them They"
POINTERS = "Same Such That There These This Those"
PREPOSITIONS = "About After Among As At Before Behind Beside By For From In Into Of On Onto Over To Under Upon With"
CONJUNCTIONS = "And Because But If Not Or So Than"
STARTS = frozenset(" ".join((QUESTIONS, PRONOUNS, POINTERS, PREPOSITIONS, CONJUNCTIONS)).split())
IN_ENTRIES = frozenset(("Of", "Its", "Their", "Those", "That", "Who", "Whose"))  # "Whether ..." describes a flag well
ENTRY = re.compile(r"^ +\w+: (\w+)", re.MULTILINE)
PEOPLE = re.compile(r"\b(anybody|everybody|nobody|somebody|someone|whoever)\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
            for before, after in itertools.pairwise(node.body):
                is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(before, ast.Assign | ast.AnnAssign) and is_string and isinstance(after.value.value, str):
                    yield after.lineno, after.value.value


def problem(text: str) -> str | None:
    """Return the rule that a docstring breaks and the words that break it; None if it breaks none."""
    words = text.split()
    first = words[0].rstrip(",.:;") if words else ""
    if len(words) <= 1:
        return "a single word does not explain"
    if first in STARTS or text.startswith("The same"):
        return "does not start with a noun or an imperative verb"
    for entry in ENTRY.finditer(text):
        if entry[1] in IN_ENTRIES:
            return f"the entry `{entry[0].strip()} ...` does not start with a noun"
    people = PEOPLE.search(text)
    return f"speaks of people ({people[0]})" if people else None


def findings(paths: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each docstring below the paths that breaks a rule."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for line, text in docstrings(ast.parse(file.read_text(encoding="utf-8"))):
                rule = problem(text)
                if rule is not None:
                    yield f"{file}:{line}: {rule}: {text.strip().partition(chr(10))[0]}"


def main(arguments: Sequence[str]) -> int:
    """Print all findings; return the exit status."""
    paths = [Path(name) for name in arguments or DEFAULT_PATHS]
    missing = [path for path in paths if not path.exists()]
    if missing:
        print(f"{missing[0]} does not exist; give files and folders that do", file=sys.stderr)
        return 2
    found = list(findings(paths))
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
