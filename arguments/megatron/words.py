"""Conversion of a value in Megatron-LM's YAML files to command line arguments.

Megatron's shell script makes flags of the file: variables are substituted, and each value passes through `xargs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_BLANKS = " \t\n"
# Parts of a word of xargs: a backslash and the next character, a quoted text, or ordinary characters.
_PART = re.compile(
    r"""\\(?P<escaped>.)|"(?P<double>[^"\n]*)"|'(?P<single>[^'\n]*)'|(?P<plain>[^\\"' \t\n]+)""", re.DOTALL
)


def with_variables(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with `${NAME}` replaced by the environment's value.

    Raises:
        ValueError: A variable is not set; names the variable.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise ValueError(f"${{{name}}} is not set in the environment; export {name} first")
        return environment[name]

    return _VARIABLE.sub(value, text)


def as_xargs(text: str) -> str:
    """Return the text as `xargs` would pass it: words without their quotes, one blank between them.

    A backslash escapes the next character, except inside quotes. A text with an unclosed quote is unchanged: xargs
    refuses it, but an apostrophe is not a mistake.
    """
    words: list[str] = []
    position, in_word = 0, False
    while position < len(text):
        if text[position] in _BLANKS:
            position, in_word = position + 1, False
            continue
        part = _PART.match(text, position)
        if part is None:
            return text
        if not in_word:
            words.append("")
        words[-1] += next(piece for piece in part.groups() if piece is not None)
        position, in_word = part.end(), True
    return " ".join(words)


def arguments_of(text: str) -> list[str]:
    """Return the arguments of a value: the value itself, with its blanks, or each word of a `[list of words]`."""
    text = as_xargs(text)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].split()
    return [text]
