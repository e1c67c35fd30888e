"""What a value in one of Megatron-LM's YAML files is as arguments of a command line.

There a shell script makes flags of the file: variables are put in, and each value passes through `xargs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_BLANKS = " \t\n"
# In a word of xargs: a backslash and what follows it, a text in quotes, or characters that are nothing special.
_PART = re.compile(
    r"""\\(?P<escaped>.)|"(?P<double>[^"\n]*)"|'(?P<single>[^'\n]*)'|(?P<plain>[^\\"' \t\n]+)""", re.DOTALL
)


def with_variables(text: str, environment: Mapping[str, str]) -> str:
    """The text with `${NAME}` replaced by the environment's value.

    Raises:
        ValueError: A variable is not set; names it.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in environment:
            raise ValueError(f"${{{name}}} is not set in the environment; export {name} first")
        return environment[name]

    return _VARIABLE.sub(value, text)


def as_xargs(text: str) -> str:
    """What `xargs` makes of a text: words without their quotes, one blank between them.

    A backslash stands for the character after it, but for inside quotes. A text in which a quote is not closed is
    left as it is: xargs refuses it, and an apostrophe is no mistake.
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
    """The arguments that a value becomes: itself, with its blanks; each word of a `[list of words]`."""
    text = as_xargs(text)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].split()
    return [text]
