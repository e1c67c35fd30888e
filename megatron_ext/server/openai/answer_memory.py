"""Memory of answers: the token ids of conversations through each answer, as the model read and wrote them.

A client sends a conversation back as text, and its tokenization often differs from the tokens that were generated. An
entry belongs to a place: its key is a hash of the scope (tenant and cache salt) and of all messages through the answer,
so equal texts of other messages or conversations never find it. `chat_prompt` decides by the rendered text whether the
ids of an entry fit.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from megatron_ext.server.openai.answers import AnswerFormat, AnswerReader, Piece, arguments_of

_OVERHEAD = 512  # bytes of an entry beside its ids
_DOMAIN = b"mext.answers"
_HASH_BYTES = 32

Calls = Sequence[tuple[str, object]]
"""Names and arguments of tool calls; arguments that are no JSON object are one with the key `INVALID_JSON`."""


def hash_messages(before: bytes, messages: Sequence[Mapping[str, object]]) -> list[bytes]:
    """Return the hash through each message.

    Spaces around contents, thinking, ids of calls and the spelling of arguments do not count: the rendered text tells
    whether they matter.

    Args:
        before: Hash of the scope.
        messages: Messages as for the chat template, with arguments of calls as objects.
    """
    hashes = []
    for message in messages:
        before = hash_message(before, str(message.get("role")), *content_and_calls(message))
        hashes.append(before)
    return hashes


def hash_scope(scope: str | None) -> bytes:
    """Return the hash of a tenant with a cache salt; without either, `scope` is missing."""
    return _hash(bytes(_HASH_BYTES), scope)


def content_and_calls(message: Mapping[str, object]) -> tuple[str, Calls]:
    """Return the content and the calls of a message."""
    content, calls = message.get("content"), message.get("tool_calls")
    called = [_call_of(call) for call in calls] if isinstance(calls, list) else []
    return content if isinstance(content, str) else "", called


def hash_message(before: bytes, role: str, content: str, calls: Calls) -> bytes:
    """Return the hash through one more message."""
    return _hash(before, [role, content.strip(), list(calls)])


def _hash(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, default=str).encode()
    return blake2b(before + text, digest_size=_HASH_BYTES, person=_DOMAIN).digest()


def _call_of(call: object) -> tuple[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return "", call
    return str(function.get("name")), function.get("arguments")


def read_answer(text: str, finish_reason: str | None, answer_format: AnswerFormat) -> tuple[str, str, Calls]:
    """Return thinking, content and calls of an answer, as the message has them that a client sends back.

    Args:
        text: Generated text.
        finish_reason: Reason for the end of the answer.
        answer_format: Markers of thinking and of calls.
    """
    whole = AnswerReader(answer_format).read(Piece(text, reason=finish_reason or "stop"))
    return whole.thinking, whole.content, [(call.name or "", arguments_of(call.arguments)) for call in whole.calls]


def digest_of(text: str) -> bytes:
    """Return the digest of a rendered text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()


@dataclass(frozen=True)
class AnsweredChat:
    """Conversation through an answer.

    Attributes:
        ids: Token ids of the prompt and the answer, without the token that ended it: the template may write another.
        answer: Text of the answer, special tokens included.
        prompt_length: Characters of the rendered prompt.
        prompt_digest: Digest of the rendered prompt.
        read_digest: Digest of the text that the ids of the prompt decode to, which may spell calls in another way.
    """

    ids: array[int]
    answer: str
    prompt_length: int
    prompt_digest: bytes
    read_digest: bytes

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.ids) * self.ids.itemsize + 4 * len(self.answer) + _OVERHEAD


Remember: TypeAlias = Callable[[bytes, AnsweredChat, bytes | None], None]
"""See `AnswerMemory.put`."""


class AnswerMemory:
    """Least recently used answers, bounded in bytes. Used in the event loop only.

    Args:
        max_bytes: Maximum size of all entries; 0 remembers nothing.

    Attributes:
        used_bytes: Size of the entries.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._entries: OrderedDict[bytes, AnsweredChat] = OrderedDict()  # the first to be dropped comes first
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        """True if answers are remembered."""
        return self._max > 0

    def put(self, key: bytes, chat: AnsweredChat, before: bytes | None) -> None:
        """Remember an answer; of two with equal text, the later one.

        Args:
            key: Key of the answer.
            chat: Conversation through the answer.
            before: Key of the answer whose ids its prompt begins with. That one is dropped before all others, since
                only another answer to the same turn needs it.
        """
        if chat.size > self._max:
            return
        self._drop(key)
        self._entries[key] = chat
        self.used_bytes += chat.size
        if before is not None and before in self._entries and before != key:
            self._entries.move_to_end(before, last=False)
        while self.used_bytes > self._max:
            self._drop(next(iter(self._entries)))

    def use(self, key: bytes) -> None:
        """Keep an answer longer than all others."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def find(self, keys: Iterable[bytes], most: int | None = None) -> dict[bytes, AnsweredChat]:
        """Return the remembered answers among keys, in their order.

        Args:
            keys: Keys of answers.
            most: Size of the answers together, of which the first is returned in any case; None for all.
        """
        found: dict[bytes, AnsweredChat] = {}
        for key in keys:
            chat = self._entries.get(key)
            if chat is None:
                continue
            if most is not None:
                if found and chat.size > most:
                    break
                most -= chat.size
            found[key] = chat
        return found

    def _drop(self, key: bytes) -> None:
        dropped = self._entries.pop(key, None)
        if dropped is not None:
            self.used_bytes -= dropped.size
