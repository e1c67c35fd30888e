"""Special tokens spelled in the texts of a conversation, and their stand-ins.

A chat template writes special tokens around contents, and then the whole text is tokenized: a content that spells one
of them would end its turn. Therefore each spelling in a content is replaced by a *stand-in* before the template is
rendered: one character of Unicode's private use area that does not occur in the conversation. Any special token spelled
in the rendered text is then from the template or the assistant. `chat_tokens` computes the ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import ConfigError

ASSISTANT = "assistant"
_STAND_INS = range(0xE000, 0xF900)  # the private use area
_UNTOUCHED_FIELDS = ("role",)  # templates compare it with constants


@dataclass(frozen=True)
class AddedToken:
    """Token that is found in texts by its spelling, before the tokenizer's model runs."""

    text: str
    token_id: int
    is_special: bool
    is_normalized: bool = False  # found in the normalized text
    is_single_word: bool = False  # found only between non-word characters


class ControlTokens:
    """Finder of special tokens in texts.

    Args:
        added: All added tokens: a longer one that is not special hides a special one.
        normalize: The tokenizer's normalizer; None if it has none, or no special token is searched after it.
    """

    def __init__(self, added: Iterable[AddedToken], normalize: Callable[[str], str] | None = None) -> None:
        tokens = sorted((token for token in added if token.text), key=lambda token: -len(token.text))
        self.special = {token.text: token.token_id for token in tokens if token.is_special}
        self._pattern = re.compile("|".join(map(_spelling, tokens)) or r"(?!)")
        ends = [(text[:i], text[i:]) for text in self.special for i in range(1, len(text))]
        self._beginnings = {beginning for beginning, _ in ends}
        self._rests = {rest for _, rest in ends}
        self._longest = max(map(len, self.special), default=0)
        self._normalize = normalize
        normalized_tokens = [token.text for token in tokens if token.is_special and token.is_normalized]
        self._normalized = {normalize(text).strip() for text in normalized_tokens} - {""} if normalize else set()

    def protect(self, messages: Sequence[Mapping[str, object]]) -> tuple[list[dict[str, object]], dict[int, str]]:
        """Return the messages with stand-ins in all texts except the assistant's, and the text of each stand-in.

        Beside whole spellings, a first part at the end of a text and a last part at its start are replaced, since the
        template's own text could complete them.

        Raises:
            ConfigError: A role spells a special token, or the conversation uses all private use characters.
        """
        for message in messages:
            role = str(message["role"])
            if not role.isidentifier() and self._finds(role):
                raise ConfigError(f"the role {role!r} spells a special token; roles are words such as 'user'")
        stand_ins = _StandIns(messages)
        protected = [
            dict(message)
            if message["role"] == ASSISTANT
            else {
                name: value if name in _UNTOUCHED_FIELDS else self._protect(value, stand_ins)
                for name, value in message.items()
            }
            for message in messages
        ]
        return protected, stand_ins.texts

    def count(self, text: str) -> int:
        """Return the number of special tokens that a text spells, before and after normalization."""
        found = sum(match.group() in self.special for match in self._pattern.finditer(text))
        if not self._normalized:
            return found
        normalized = self._normal_form(text)
        return found + sum(normalized.count(token) for token in self._normalized)

    def rename(self, text: str, names: Mapping[str, str]) -> str:
        """Return the text with special tokens under other names."""
        return self._pattern.sub(lambda match: names.get(match.group(), match.group()), text)

    def _finds(self, text: str) -> bool:
        return any(match.group() in self.special for match in self._pattern.finditer(text))

    def _protect(self, value: Any, stand_ins: _StandIns) -> Any:
        if isinstance(value, str):
            return self._protect_text(value, stand_ins)
        if isinstance(value, Mapping):
            return {self._protect(name, stand_ins): self._protect(item, stand_ins) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect(item, stand_ins) for item in value]
        return value

    def _protect_text(self, text: str, stand_ins: _StandIns) -> str:
        def replace(match: re.Match[str]) -> str:
            spelled = match.group()
            return stand_ins.of(spelled) if spelled in self.special else spelled

        protected = self._protect_ends(self._pattern.sub(replace, text), stand_ins)
        if self._normalized and self._is_spelled_differently(protected):
            inner = protected.strip()
            return protected.replace(inner, stand_ins.of(inner.translate(stand_ins.texts)), 1)
        return protected

    def _protect_ends(self, text: str, stand_ins: _StandIns) -> str:
        """Replace partial spellings at both ends of a text, inside of surrounding spaces, which templates strip."""
        body = text.strip()
        rest = next((body[:n] for n in self._lengths(body) if body[:n] in self._rests), "")
        beginning = next((body[-n:] for n in self._lengths(body) if body[-n:] in self._beginnings), "")
        if len(rest) + len(beginning) > len(body):
            beginning = ""
        if not rest and not beginning:
            return text
        inner = body[len(rest) : len(body) - len(beginning)]
        start = text.index(body)
        around = text[:start], text[start + len(body) :]
        return around[0] + stand_ins.of(rest) + inner + stand_ins.of(beginning) + around[1]

    def _normal_form(self, text: str) -> str:
        return text if self._normalize is None else self._normalize(text)

    def _lengths(self, text: str) -> range:
        return range(min(len(text), self._longest), 0, -1)

    def _is_spelled_differently(self, text: str) -> bool:
        """Return whether normalization makes a special token of the text."""
        normalized = self._normal_form(text)
        return any(token in normalized for token in self._normalized)


def _spelling(token: AddedToken) -> str:
    pattern = re.escape(token.text)
    return rf"(?<!\w){pattern}(?!\w)" if token.is_single_word else pattern


class _StandIns:
    """Stand-ins: characters that do not occur in a conversation."""

    def __init__(self, messages: Sequence[Mapping[str, object]]) -> None:
        self._messages = messages
        self._free: list[int] | None = None
        self._of: dict[str, str] = {}

    @property
    def texts(self) -> dict[int, str]:
        """Texts of the stand-ins, in the form of `str.translate`."""
        return {ord(character): text for text, character in self._of.items()}

    def of(self, text: str) -> str:
        """Return the stand-in of a text; an empty text needs none."""
        if text and text not in self._of:
            if self._free is None:
                used = set(json.dumps(self._messages, ensure_ascii=False, default=str))
                self._free = [code for code in reversed(_STAND_INS) if chr(code) not in used]
            if not self._free:
                raise ConfigError("the conversation uses all private-use characters; leave some out")
            self._of[text] = chr(self._free.pop())
        return self._of.get(text, "")
