"""Calls of tools in a text, as Hermes' models and those of its kind write them.

    I look it up. <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

What is no such object stays text, with its marks. Spaces between text and calls are nobody's. However a text comes in
pieces, contents and calls are the same.
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
    """Takes a growing text apart.

    Args:
        most: Calls that are told; those behind them are left out.

    Attributes:
        count: Calls told so far.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self._max = most
        self._held = ""  # may be the beginning of a call
        self._spaces = ""  # behind the content so far
        self._is_behind_call = False

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """What has become certain: content, and calls.

        Args:
            text: What has come since the last call.
            is_last: Nothing follows. A call that is not closed then counts, if it is one.
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
            self._spaces, self._is_behind_call = "", True
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
        """The text as content, less the spaces at its end, which may lie before a call."""
        if self._is_behind_call:
            text = text.lstrip()
            self._is_behind_call = not text
        text = self._spaces + text
        content = text.rstrip()
        self._spaces = text[len(content) :]
        return content


def read_call(text: str) -> ToolCall | None:
    """The call that stands between the marks; None if it is none."""
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
    """Characters at the end of `text` with which a call may begin."""
    longest = min(len(text), len(OPENING) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(OPENING[:length])), 0)
