"""Patterns of JSON schemas (ECMA-262) in the syntax of the grammar library (Rust's crate regex)."""

from __future__ import annotations

import re
from dataclasses import dataclass

ANY = "(?s:.)*"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}  # in Rust they have digits and letters of all scripts
_CONTROLS = {"0": "\\x00", "f": "\\f", "n": "\\n", "r": "\\r", "t": "\\t", "v": "\\v"}
_ANCHORS = {"A": "^", "z": "$", "Z": "$"}  # of other dialects, beside ^ and $
_KEPT = frozenset("bBkpPsSux123456789")  # read alike, or refused by the library
_BRACES = re.compile(r"\{\d+(?:,\d*)?\}")
_HEAD = re.compile(r"\((?:\?(?:P?<\w+>|<?[=!]|[a-z-]*:|[a-z-]+(?=\))))?")
_SURROGATES = re.compile(r"u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_ESCAPE = re.compile(r"c[A-Za-z]|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|(?s:.)")


@dataclass
class _Part:
    """Character, class, anchor or group of an expression.

    Attributes:
        text: Text, or the head of a group.
        inner: Alternatives of a group; None if it is no group.
        quantifier: Repetition; may be empty.
    """

    text: str
    inner: list[list[_Part]] | None = None
    quantifier: str = ""

    @property
    def is_open(self) -> bool:
        """True for a group whose alternatives may begin or end a text."""
        return self.inner is not None and not self.quantifier and self.text[-1] in "(:>"


def translated(pattern: str) -> str:
    """Return the pattern in the library's syntax; what the library does not support stays."""
    return _converted(pattern, "")


def searched(pattern: str) -> str:
    """Return an expression of the whole texts in which the pattern occurs, without anchors at its ends."""
    return _converted(pattern, ANY)


def with_patterns(schema: object) -> object:
    """Return a JSON schema whose patterns are in the library's syntax."""
    if isinstance(schema, list):
        return [with_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, object] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = translated(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {translated(name): with_patterns(one) for name, one in value.items()}
        else:
            found[key] = value if key in ("enum", "const") else with_patterns(value)
    return found


def _converted(pattern: str, around: str) -> str:
    try:
        return _text(_Reader(pattern).alternatives(), around, around)
    except RecursionError:  # nested deeper than the library supports
        return pattern


def _text(alternatives: list[list[_Part]], before: str, after: str) -> str:
    return "|".join(_sequence(parts, before, after) for parts in alternatives)


def _sequence(parts: list[_Part], before: str, after: str) -> str:
    """Return one alternative, which `before` and `after` surround unless it is anchored."""
    first, last = 0, len(parts)
    if before:
        while first < last and parts[first].text == "^":
            first, before = first + 1, ""
    if after:
        while first < last and parts[last - 1].text == "$":
            last, after = last - 1, ""
    written = []
    for i, part in enumerate(parts[first:last], first):
        inside = [before if i == first and part.is_open else "", after if i == last - 1 and part.is_open else ""]
        before = "" if inside[0] else before
        after = "" if inside[1] else after
        written.append(part.text if part.inner is None else f"{part.text}{_text(part.inner, *inside)})")
        written.append(part.quantifier)
    return before + "".join(written) + after


class _Reader:
    """Reader of a pattern's parts."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def alternatives(self, *, is_group: bool = False) -> list[list[_Part]]:
        """Read up to the end, or to the parenthesis that ends a group."""
        found: list[list[_Part]] = [[]]
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == ")" and is_group:
                break
            if char == "|":
                self._at += 1
                found.append([])
            elif found[-1] and (char in "*+?" or (char == "{" and _BRACES.match(self._text, self._at))):
                found[-1][-1].quantifier += self._quantifier()
            else:
                found[-1].append(self._part(char))
        return found

    def _quantifier(self) -> str:
        match = _BRACES.match(self._text, self._at)
        text = match[0] if match else self._text[self._at]
        self._at += len(text)
        return text

    def _part(self, char: str) -> _Part:
        if char == "(":
            head = _HEAD.match(self._text, self._at)
            assert head is not None, "it begins with a parenthesis"
            self._at = head.end()
            inner = self.alternatives(is_group=True)
            self._at += 1
            return _Part(head[0], inner)
        self._at += 1
        if char == "[":
            return _Part(self._class())
        if char == "\\":
            return _Part(self._escape(is_class=False))
        return _Part(char if char in "^$." else _literal(char))

    def _escape(self, *, is_class: bool) -> str:
        """Read what follows a backslash."""
        pair = _SURROGATES.match(self._text, self._at)
        if pair is not None:
            self._at = pair.end()
            return f"\\x{{{ord(bytes.fromhex(pair[1] + pair[2]).decode('utf-16-be')):x}}}"
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            return "\\"
        self._at = match.end()
        name, char = match[0], match[0][0]
        if char in "dwDW":
            inner = _CLASSES[char.lower()]
            return inner if is_class and char.islower() else f"[{'^' if char.isupper() else ''}{inner}]"
        if char == "c" and len(name) == 2:
            return f"\\x{ord(name[1]) % 32:02x}"
        if is_class and char == "b":
            return "\\x08"
        if char in _CONTROLS:
            return _CONTROLS[char]
        if not is_class and char in _ANCHORS:
            return _ANCHORS[char]
        return f"\\{name}" if char in _KEPT else _literal(char)

    def _class(self) -> str:
        """Read a class of characters after its bracket."""
        parts: list[str] = []
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        follows_class = False  # a dash there is no range
        while self._at < len(self._text) and (char := self._text[self._at]) != "]":
            self._at += 1
            escaped = self._text[self._at : self._at + 1] if char == "\\" else ""
            is_range = char == "-" and parts and not follows_class and not self._ends_range()
            parts.append(self._escape(is_class=True) if escaped else "-" if is_range else _literal(char))
            follows_class = escaped != "" and escaped in "dwsDWS"
        if self._at >= len(self._text):
            return "[" + "".join(parts)  # the library says that it is not closed
        self._at += 1
        if not parts:
            return "(?s:.)" if is_negated else "[]"
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _ends_range(self) -> bool:
        """Return whether a dash before this place stands for itself: at the end, or before a class."""
        rest = self._text[self._at : self._at + 2]
        return rest[:1] == "]" or (rest[:1] == "\\" and rest[1:] in tuple("dwsDWS"))


def literal(text: str) -> str:
    """Return the expression of a text; a slash would end the expression in a grammar."""
    return "".join(_literal(char) for char in text)


def _literal(char: str) -> str:
    if char.isprintable():
        return f"\\{char}" if char in "\\.+*?()|[]{}^$#&-~/" else char
    return f"\\x{{{ord(char):x}}}"
