"""Markdown of the reference pages: tables, and text that is not Markdown itself."""

from __future__ import annotations

import re


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([cell(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Return a text for a cell of a table: on one line, without bars and tags."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def plain(text: str) -> str:
    """Return a text that Markdown shows as it is: stars and brackets are no marks."""
    return re.sub(r"([*_\[\]])", r"\\\1", text)
