#!/usr/bin/env python
"""Check that docstrings, comments and messages can be read without guessing what a word stands for.

- Docstrings start with a noun or an imperative verb. Strings that follow an assignment are docstrings, too.
- Docstrings and comments do not speak of things as people, or in riddles (`RIDDLES`).
- All other strings of several words are messages, since errors, log lines and help texts are made of them. They also
  have nouns instead of pronouns that stand for them (`NO_NOUNS`), and name a limit as `must be at most` (`WOULD_DO`).

Each place that breaks a rule is printed as `path:line: rule: text`. Exit status: 0 without findings, 1 with some, 2 for
a path that does not exist.

    python tools/check_docstrings.py [PATH ...]     (default: megatron_ext, arguments and tools)
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

DEFAULT_PATHS = ("megatron_ext", "arguments", "tools")
# After such a first word the reader has to guess the subject.
QUESTIONS = "How What Whatever When Where Whether Which Who Whom Whose Why"
PRONOUNS = "Anything He Her Hers His It Its Mine Nothing Others Ours She Their Theirs Them They"
POINTERS = "Same Such That There These This Those"
PREPOSITIONS = "About After Among As At Before Behind Beside By For From In Into Of On Onto Over To Under Upon With"
CONJUNCTIONS = "And Because But If Not Or So Than"
STARTS = frozenset(" ".join((QUESTIONS, PRONOUNS, POINTERS, PREPOSITIONS, CONJUNCTIONS)).split())
IN_ENTRIES = frozenset(("Of", "Its", "Their", "Those", "That", "Who", "Whose"))  # "Whether ..." describes a flag well
ENTRY = re.compile(r"^ +\w+: (\w+)", re.MULTILINE)

PEOPLE = re.compile(r"\b(anybody|everybody|nobody|somebody|someone|whoever)\b", re.IGNORECASE)
RIDDLES = re.compile(
    r"\b((is|are)\s+(?-i:none)|is\s+no\s+\w+\s+of|(stands?|goes|come)\s+behind"
    r"|who\s+(asks?|waits?|comes|ends|runs|decodes|has|have|wants?|is|are))\b",
    re.IGNORECASE,
)
NO_NOUNS = re.compile(  # "What ..." begins a question
    r"\b((those|that)\s+(of|that|which)|the\s+ones?\s+that|such\s+a\s+one|so\s+many"
    r"|(?-i:what)\s+(is|was|are|were|has|had|have|it|they|its|he|comes|came|goes|went|stands|stood|remains|does|did"
    r"|can|will|would|may|must|becomes|became))\b",
    re.IGNORECASE,
)
WOULD_DO = re.compile(r"\bwould\s+do\b", re.IGNORECASE)
# Rules for every text, and for messages.
IN_ALL = {"speaks of people": PEOPLE, "does not name its subject": RIDDLES}
IN_MESSAGES = IN_ALL | {"has a pronoun instead of a noun": NO_NOUNS, "does not say `must be`": WOULD_DO}
MESSAGE_WORDS = 3  # shorter strings are names, formats and patterns


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


def messages(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string below a node that is not a docstring; values are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant):
            if isinstance(child.value, str) and not isinstance(node, ast.Expr | ast.JoinedStr):
                yield child.lineno, child.value
            continue
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in child.values)
            yield child.lineno, "".join(map(str, parts))
        yield from messages(child)


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment of a module."""
    with tokenize.open(file) as opened:
        for token in tokenize.generate_tokens(opened.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


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
    return wrong_words(text, IN_ALL)


def wrong_words(text: str, rules: dict[str, re.Pattern[str]]) -> str | None:
    """Return the first of the rules that a text breaks and the words that break it; None if it breaks none."""
    for rule, pattern in rules.items():
        if found := pattern.search(text):
            return f"{rule} ({' '.join(found[0].split())})"
    return None


def findings(paths: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each place below the paths that breaks a rule."""
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found = [(line, text, problem(text)) for line, text in docstrings(tree)]
            found += [(line, text, wrong_words(text, IN_ALL)) for line, text in comments(file)]
            said = [(line, text) for line, text in messages(tree) if len(text.split()) >= MESSAGE_WORDS]
            found += [(line, text, wrong_words(text, IN_MESSAGES)) for line, text in said]
            for line, text, rule in sorted(found, key=lambda one: one[0]):
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
