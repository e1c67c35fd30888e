"""Parser of tool calls in generated text, as models in the style of Hermes write them.

    I look it up. <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Anything that is not such an object stays text, markers included. Spaces between text and calls are dropped. Content and
calls do not depend on how the text is split into pieces.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallReader:
    """Incremental parser of a growing text.

    Args:
        max_calls: Maximum number of calls returned; later ones are dropped.

    Attributes:
        count: Calls returned so far.
    """

    def __init__(self, max_calls: int) -> None:
        self.count = 0
        self._max = max_calls
        self._held = ""  # may be the beginning of a call
        self._spaces = ""  # after the content so far
        self._follows_call = False

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Return content and calls that have become certain.

        Args:
            text: New text since the last call.
            is_last: Whether the text ends here. An unclosed call then counts if it is valid.
        """
        self._held += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while (start := self._held.find(OPENING)) >= 0:
            content.append(self._content(self._held[:start]))
            self._held = self._held[start:]
            end = self._held.find(CLOSING)
            if end < 0 and not is_last:
                return "".join(content), calls
            whole = self._held if end < 0 else self._held[: end + len(CLOSING)]
            self._held = self._held[len(whole) :]
            call = read_call(whole.removeprefix(OPENING).removesuffix(CLOSING))
            if call is None:
                content.append(self._content(whole))
                continue
            self._spaces, self._follows_call = "", True
            if self.count < self._max:
                self.count += 1
                calls.append(call)
        certain = len(self._held) if is_last else len(self._held) - _overlap(self._held)
        content.append(self._content(self._held[:certain]))
        self._held = self._held[certain:]
        if is_last and not self.count:
            content.append(self._spaces)
        return "".join(content), calls

    def _content(self, text: str) -> str:
        """Return the text as content, less the spaces at its end, which may precede a call."""
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        text = self._spaces + text
        content = text.rstrip()
        self._spaces = text[len(content) :]
        return content


def read_call(text: str) -> ToolCall | None:
    """Return the call between the markers; None if the text is not a call."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return None
    arguments = content.get("arguments", content.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(content["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """Return the number of characters at the end of `text` that may begin a call."""
    longest = min(len(text), len(OPENING) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(OPENING[:length])), 0)
