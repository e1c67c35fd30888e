"""Thinking of reasoning models: markers by family, and an incremental parser that separates it from the answer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.errors import ConfigError
from megatron_ext.text.tool_calls.source import overlap


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around thinking.

    Attributes:
        name: Value of `--reasoning-parser`.
        opening: Marker before it.
        closing: Marker after it.
    """

    name: str
    opening: str
    closing: str


# In the order in which templates are searched.
FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
)
NAMES = tuple(one.name for one in FORMATS)


def format_named(name: str) -> ReasoningFormat:
    """Return the format of a name.

    Raises:
        ConfigError: The name is not known.
    """
    found = next((one for one in FORMATS if one.name == name), None)
    if found is None:
        raise ConfigError(f"there is no format {name!r} of thinking; {', '.join(NAMES)} are known")
    return found


def format_of(template: str | None) -> ReasoningFormat | None:
    """Return the format that a chat template shows; None if it shows none."""
    return next((one for one in FORMATS if template is not None and one.closing in template), None)


def begins_inside(prompt: str, reasoning_format: ReasoningFormat) -> bool:
    """Return whether a rendered prompt ends inside of thinking: with an opening marker that is not closed."""
    tail = prompt.rstrip()
    return tail.endswith(reasoning_format.opening)


class ReasoningReader:
    """Incremental parser of a growing text that may begin with thinking.

    Spaces around thinking and before the answer are dropped. Parts do not depend on how the text is split.

    Args:
        reasoning_format: Markers.
        is_inside: Whether the text begins inside of thinking.

    Attributes:
        has_thought: Whether the text had thinking so far.
        is_inside: Whether the text so far ends inside of thinking.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, is_inside: bool) -> None:
        self._reasoning_format = reasoning_format
        self._is_before = not is_inside  # an opening marker may follow
        self._skips = is_inside  # spaces before the next part
        self._held = ""
        self.is_inside = is_inside
        self.has_thought = is_inside

    def feed(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> tuple[str, str]:
        """Return the thinking and the answer's text that have become certain.

        Args:
            text: New text since the last call.
            is_last: Whether the text ends here.
            is_cut: Whether a limit ended the text, and not the model: the beginning of the opening marker is no answer.
        """
        self._held += text
        thinking = ""
        if self._is_before:
            start = self._held.lstrip()
            if start.startswith(self._reasoning_format.opening):
                self._held = start.removeprefix(self._reasoning_format.opening)
                self._is_before, self.is_inside, self.has_thought, self._skips = False, True, True, True
            elif (not is_last or (is_cut and start)) and self._reasoning_format.opening.startswith(start):
                return "", ""
            else:
                self._is_before = False
        if self.is_inside:
            end = self._held.find(self._reasoning_format.closing)
            thinking = self._taken(end, is_last=is_last)
            if self.is_inside:
                return thinking, ""
        if self._skips:
            self._held = self._held.lstrip()
            self._skips = not self._held
        answer, self._held = self._held, ""
        return thinking, answer

    def _taken(self, end: int, *, is_last: bool) -> str:
        """Return the thinking up to the closing marker at `end`, or up to text that may begin the marker."""
        if self._skips:
            length = len(self._held)
            self._held = self._held.lstrip()
            end -= (length - len(self._held)) if end >= 0 else 0
            self._skips = not self._held
        if end >= 0:
            thinking = self._held[:end].rstrip()
            self._held = self._held[end + len(self._reasoning_format.closing) :]
            self.is_inside, self._skips = False, True
            return thinking
        certain = len(self._held) - overlap(self._held, self._reasoning_format.closing)
        text = self._held[:certain]
        kept = text if is_last and text == self._held else text.rstrip()
        self._held = self._held[len(kept) :]
        return kept
