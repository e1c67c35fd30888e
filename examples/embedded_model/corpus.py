"""English text that comes with Python itself: help topics and the standard library's docstrings.

Read from the source files with `ast`; nothing of the library is imported. One document is a module (its docstrings in
source order, each under the name it documents) or a help topic of `pydoc_data.topics`.

The split depends on a document's name only, so that a module is on the same side in every Python version. Nothing
leaks from one side to the other: a paragraph of `DUPLICATE_LENGTH` characters or more is kept only where it is seen
first, and the held-out documents are read first, so no such paragraph of theirs is left in a training document.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigError

HELD_OUT_ONE_IN = 25
SPLIT_SALT = "heldout "  # of the few tried, the one whose held-out text is not mostly one long module
DUPLICATE_LENGTH = 32  # characters; shorter paragraphs ("See also:") are phrases, not copies
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idle_test", "turtledemo", "site-packages", "dist-packages", "lib-dynload", "pydoc_data")
)
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows the Python standard library.",
    "You answer questions about Python. Answer in one or two sentences.",
    "You are the help desk of a company that writes software in Python. Be polite and be brief.",
    "You explain the Python standard library to people who are new to it. Use plain words. Do not guess: "
    "if you do not know the answer, say so.",
    "You are a careful assistant. Read the question, find the function that it names, and say what it does. "
    "Do not write more than was asked.",
)
QUESTIONS = ("What does {name} do?", "What is {name}?", "Can you explain {name}?", "Please describe {name}.")
TURNS_PER_CHAT = 4
ANSWER_LENGTH = (20, 400)  # characters
ONE_MODULE_IN_CHATS = 3
ONE_CHAT_WITH_DOCUMENTATION_IN = 3
DOCUMENTATION_LENGTH = 1200  # characters


@dataclass(frozen=True)
class Entry:
    """One docstring: the dotted name it documents, the name with its parameters, and the text."""

    name: str
    heading: str
    text: str


@dataclass(frozen=True)
class Document:
    """A module or help topic: the name that decides its split, and its docstrings in source order."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def text(self) -> str:
        """The whole document as training text."""
        return "\n\n".join(f"{entry.heading}\n\n{entry.text}" for entry in self.entries)


def name_hash(name: str) -> int:
    """Return a number that depends on the name only, the same in every process and version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    """Return whether a document belongs to the held-out split (about one in `HELD_OUT_ONE_IN`)."""
    return name_hash(SPLIT_SALT + name) % HELD_OUT_ONE_IN == 0


def held_out_documents(library: Path | None = None) -> list[Document]:
    """Return the documents of the held-out split, ordered by name; only their files are read."""
    return list(_without_repeats(_read(_library(library), held_out=True), seen=set()))


def training_documents(library: Path | None = None) -> list[Document]:
    """Return the documents to train on, ordered by name, without paragraphs that are in held-out documents."""
    root = _library(library)
    seen: set[str] = set()
    for _ in _without_repeats(_read(root, held_out=True), seen):
        pass  # only to fill `seen`
    return list(_without_repeats(_read(root, held_out=False), seen))


def chat_documents(documents: Iterable[Document]) -> list[str]:
    """Conversations made of the docstrings of one module in `ONE_MODULE_IN_CHATS`, several turns each.

    `<|system|>...<|end|><|user|>...<|end|><|assistant|>...<|end|><|user|>...`: markers and texts follow each other
    without spaces or line breaks. The answer is the docstring's first paragraph on one line. Some system prompts go
    on with the beginning of the module's documentation, so that long ones are known too.
    """
    chats = []
    for document in documents:
        if name_hash("chat " + document.name) % ONE_MODULE_IN_CHATS == 0:
            turns = [_turn(entry) for entry in document.entries if is_answer(first_paragraph(entry.text))]
            chats += [
                _system_turn(document, start) + "".join(turns[start : start + TURNS_PER_CHAT])
                for start in range(0, len(turns), TURNS_PER_CHAT)
            ]
    return chats


def _library(root: Path | None) -> Path:
    root = root or Path(sysconfig.get_paths()["stdlib"])
    if not (root / "pydoc_data" / "topics.py").is_file():
        raise ConfigError(
            f"this Python has no source of its standard library at {root} (pydoc_data/topics.py is missing); "
            "use a full Python installation"
        )
    return root


def _read(root: Path, held_out: bool) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if SKIPPED_FOLDERS.isdisjoint(parts) and is_held_out(name) == held_out:
            yield Document(name, tuple(_module_entries(name, _parse(path))))
    topics = ast.literal_eval(_assigned_value(_parse(root / "pydoc_data" / "topics.py"), "topics"))
    for topic in sorted(topics):
        name = f"topic {topic}"
        if is_held_out(name) == held_out:
            yield Document(name, (Entry(topic, topic, topics[topic].strip()),))


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own invalid escapes
        return ast.parse(path.read_bytes(), filename=str(path))


def _assigned_value(module: ast.Module, name: str) -> ast.expr:
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node.value
    raise ConfigError(f"pydoc_data/topics.py of this Python assigns no {name!r}")


def _module_entries(name: str, module: ast.Module) -> Iterator[Entry]:
    docstring = ast.get_docstring(module)
    if docstring:
        yield Entry(name, name, docstring)
    yield from _nested_entries(name, module)


def _nested_entries(prefix: str, parent: ast.AST) -> Iterator[Entry]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, DOCUMENTED):
            name = f"{prefix}.{node.name}"
            docstring = ast.get_docstring(node)
            if docstring:
                yield Entry(name, name + _parameters(node), docstring)
            if isinstance(node, ast.ClassDef):
                yield from _nested_entries(name, node)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _nested_entries(prefix, node)


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return ""
    arguments = node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return f"({', '.join(name for name in names if name not in ('self', 'cls'))})"


def _without_repeats(documents: Iterable[Document], seen: set[str]) -> Iterator[Document]:
    """Drop the paragraphs that are in `seen`, and add the others to it. Empty entries and documents vanish."""
    for document in documents:
        entries = [Entry(e.name, e.heading, _new_paragraphs(e.text, seen)) for e in document.entries]
        kept = tuple(entry for entry in entries if entry.text)
        if kept:
            yield Document(document.name, kept)


def _new_paragraphs(text: str, seen: set[str]) -> str:
    kept = []
    for paragraph in paragraphs(text):
        key = " ".join(paragraph.split())
        if len(key) < DUPLICATE_LENGTH or key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)


def paragraphs(text: str) -> list[str]:
    """Return the parts of a text between empty lines."""
    return [part for part in re.split(r"\n\s*\n", text.rstrip()) if part.strip()]


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a text on one line."""
    return " ".join(paragraphs(text)[0].split())


def is_answer(text: str) -> bool:
    """Return whether a paragraph is an answer in conversations: neither too short nor too long, and a sentence."""
    shortest, longest = ANSWER_LENGTH
    return shortest <= len(text) <= longest and text[0].isalpha()


def _system_turn(document: Document, start: int) -> str:
    draw = name_hash(f"{document.name} {start}")
    prompt = SYSTEM_PROMPTS[draw % len(SYSTEM_PROMPTS)]
    if draw // len(SYSTEM_PROMPTS) % ONE_CHAT_WITH_DOCUMENTATION_IN == 0:
        prompt += "\n\n" + document.text[:DOCUMENTATION_LENGTH].rstrip()
    return f"{SYSTEM}{prompt}{END}"


def _turn(entry: Entry) -> str:
    question = QUESTIONS[name_hash(entry.name) % len(QUESTIONS)].format(name=entry.name)
    return f"{USER}{question}{END}{ASSISTANT}{first_paragraph(entry.text)}{END}"
