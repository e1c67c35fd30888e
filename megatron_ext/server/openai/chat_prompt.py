"""Prompts of conversations that continue from the token ids of an earlier answer, and the memory of answers.

A client sends a conversation back as text, and its tokenization often differs from the tokens that were generated. An
answer is remembered with the token ids of the conversation through it, as the model read and wrote them. An entry
belongs to a place: its key is a hash of the scope (tenant and cache salt) and of all messages through the answer, so
equal texts of other messages or conversations never find it. The rendered text decides whether the ids of an entry fit.

```
rendered    <user>Hi<end><assistant>Hello!<end><user>More<end><assistant>
ids         [ of the answered conversation )[ of the remaining text     )
```
The text that the ids of an answered conversation decode to is not tokenized again; the remaining text is tokenized by
itself, so no token crosses the edge. The whole prompt, decoded with special tokens, must equal the rendered text, else
it is tokenized as if no answer were known. One difference is allowed: a template may spell the calls of an answer in
another way than the model did.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, TypeAlias

from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.answers import AnswerReader, Piece, arguments_of
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import MAX_CALLS
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import ASSISTANT, RenderedChat
from megatron_ext.text.tokenizer import begin_once
from megatron_ext.text.tool_calls.formats import AnswerFormat
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function

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


SentIds: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its answer."""


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt of a conversation. A router may have it read by one server, and hand it on to another.

    Attributes:
        ids: Token ids.
        before: Hash through the messages before the answer.
        begun: Content that the answer continues; empty unless the last message is continued.
        length: Characters of the rendered prompt.
        digest: Digest of the rendered prompt.
        read_digest: Digest of the text that the ids decode to: `digest`, unless calls of earlier answers are spelled in
            another way than in the rendered prompt.
        answer: Key of the answer whose conversation the ids begin with; None without one.
        retokenized: Positions [start, end) at which an earlier turn has other tokens; None for no such positions.
        marks: Positions of `cache_control` marks, the last one first.
    """

    ids: Sequence[int]
    before: bytes
    begun: str
    length: int
    digest: bytes
    read_digest: bytes
    answer: bytes | None = None
    retokenized: tuple[int, int] | None = None
    marks: tuple[int, ...] = ()

    def key(self, content: str, calls: Calls) -> bytes:
        """Return the key of an answer to this prompt, as the message that a client sends back."""
        return hash_message(self.before, ASSISTANT, self.begun + content, calls)

    def answered(self, generated: Sequence[int], chat_format: ChatFormat) -> AnsweredChat:
        """Return the conversation through an answer to this prompt."""
        written = list(generated[:-1] if generated and generated[-1] in chat_format.ends else generated)
        text = chat_format.tokenizer.detokenize(written, skip_special_tokens=False)
        ids = array("i", self.ids) + array("i", written)
        return AnsweredChat(ids, text, self.length, self.digest, self.read_digest)


class Conversation:
    """Conversation whose prompt is to be tokenized.

    Args:
        messages: Messages as for the chat template.
        scope: Tenant and cache salt, whose answers it may continue.
        chat_format: Chat template and tokens of the model.
        options: Template options.
        sent: Token ids that messages of the assistant carry, of the prompt and the answer, by the index of the message.

    Attributes:
        places: Keys of the answers among the messages, by their index, the last one first.
    """

    def __init__(
        self,
        messages: Sequence[dict[str, object]],
        scope: str | None,
        chat_format: ChatFormat,
        options: ChatOptions,
        sent: Mapping[int, SentIds] | None = None,
    ) -> None:
        self._messages, self._sent = messages, sent or {}
        self._format, self._options = chat_format, options
        self._tokenizer = chat_format.tokenizer
        self._hashes = [hash_scope(scope), *hash_messages(hash_scope(scope), messages)]
        places = [index for index, message in enumerate(messages) if message.get("role") == ASSISTANT]
        self.places = {index: self._hashes[index + 1] for index in reversed(places)}

    @cached_property
    def chat(self) -> RenderedChat:
        """The rendered conversation.

        Raises:
            ConfigError: See `ChatFormat.render_dicts`.
        """
        return self._format.render_dicts(self._messages, self._options)

    def tokenize(self, known: Mapping[bytes, AnsweredChat]) -> ChatPrompt:
        """Return the prompt.

        Args:
            known: Answered conversations that it may continue, by the key of the answer.

        Raises:
            ConfigError: Token ids that the last message of the assistant carries do not read as the conversation before
                it, or do not give its fields.
        """
        remembered = [(index, known[key]) for index, key in self.places.items() if key in known]
        answered = [*self._sent_chat(remembered), *remembered]
        prompts = (self._continued(index, chat) for index, chat in answered)
        found = next((one for one in prompts if one is not None), None)
        if found is None:
            found = self._prompt(begin_once(self.chat.ids(), self._tokenizer.bos))
        before = answered[0][1].ids if answered else array("i")
        start = common_length(array("i", found.ids), before)
        return replace(found, retokenized=(start, len(before))) if start < len(before) else found

    def _prompt(self, ids: Sequence[int], answer: bytes | None = None, read: str | None = None) -> ChatPrompt:
        """Return the prompt of ids that decode to a text, by default the rendered one."""
        text, before, begun = self.chat.text, self._hashes[-1], ""
        digest = digest_of(text)
        if self._options.continue_final_message:
            before, begun = self._hashes[-2], content_and_calls(self._messages[-1])[0]
        read_digest = digest if read is None or read == text else digest_of(read)
        return ChatPrompt(ids, before, begun, len(text), digest, read_digest, answer)

    def _sent_chat(self, remembered: Sequence[tuple[int, AnsweredChat]]) -> list[tuple[int, AnsweredChat]]:
        """Return the conversation through the last answer whose token ids were sent; empty without such ids."""
        if not self._sent:
            return []
        last = max(self._sent)
        found = self._verified(last, remembered)
        if found is None:  # earlier answers may have calls in another spelling: verify from the first one on
            before: list[tuple[int, AnsweredChat]] = []
            for index in sorted(self._sent):
                found = self._verified(index, [*before, *remembered])
                before = before if found is None else [(index, found)]
        if found is None:
            raise ConfigError(f"messages.{last}.prompt_token_ids do not read as the conversation before the message")
        self._check_fields(last)
        return [(last, found)]

    def _verified(self, index: int, known: Sequence[tuple[int, AnsweredChat]]) -> AnsweredChat | None:
        """Return the conversation through a message that carries ids; None if they do not read as the text before it.

        Args:
            index: Index of the message.
            known: Answered conversations that its prompt may have continued.
        """
        if not index:  # an answer to nothing
            return None
        prompt, generated = self._sent[index]
        options = replace(self._options, add_generation_prompt=True, continue_final_message=False)
        before = Conversation(self._messages[:index], None, self._format, options)
        found = before._prompt(prompt)
        if self._read(list(prompt)) != before.chat.text:
            found = before.tokenize({before.places[i]: chat for i, chat in known if i < index})
            if found.ids != list(prompt):
                return None
        return found.answered(generated, self._format)

    def _check_fields(self, index: int) -> None:
        """Check that the ids of an answer give the fields of its message, by the parsers that read answers."""
        prompt, generated = self._sent[index]
        is_read_whole = self._format.calls_are_special or self._format.thinking_is_special  # some are markers
        text = self._tokenizer.detokenize(list(generated), skip_special_tokens=not is_read_whole)
        message = self._messages[index]
        content, calls = content_and_calls(message)
        tools: list[Any] = [tool["function"] for tool in self._options.tools]
        functions = tuple(Function(one["name"], one.get("parameters") or ANY_OBJECT) for one in tools)
        inside = self._format.ends_inside_thinking(prompt)
        for reasoning in dict.fromkeys((self._format.reasoning, None)):  # with and without `separate_reasoning`
            form = AnswerFormat(self._format.tool_calls, functions, len(functions) and MAX_CALLS, reasoning, inside)
            thinking, written, written_calls = read_answer(text, "stop", form)
            has_thought = message.get("reasoning_content") in (None, thinking)
            if has_thought and (written.strip(), written_calls) == (content.strip(), calls):
                return
        raise ConfigError(f"messages.{index}.generation_token_ids do not give the fields of the message")

    def _continued(self, index: int, known: AnsweredChat) -> ChatPrompt | None:
        """Return the prompt that continues an answered conversation; None if it is not the rendered one.

        The answered prompt must still decode to the text that it was verified as, so that neither another tokenizer nor
        another template reads its ids as something else.
        """
        text, prompt_end = self.chat.text, known.prompt_length
        if digest_of(text[:prompt_end]) != known.prompt_digest:
            return None
        is_shown = text.startswith(known.answer, prompt_end)
        start = prompt_end + len(known.answer) if is_shown else self._after_calls(index, prompt_end, known.answer)
        if start is None:
            return None
        ids = known.ids.tolist() + self.chat.ids_from(start)
        read, rest = self._read(ids), known.answer + text[start:]
        if not read.endswith(rest) or digest_of(read.removesuffix(rest)) != known.read_digest:
            return None
        return self._prompt(ids, self.places[index], read)

    def _after_calls(self, index: int, prompt_end: int, answer: str) -> int | None:
        """Return where the rendered text continues after an answer whose calls it spells in another way.

        The text before the calls is unchanged; the calls are equal as values, since the key of the answer covers them.
        None if anything else differs.
        """
        calls, end_of_turn = self._format.tool_calls, self._format.end_of_turn
        if end_of_turn is None or not self._messages[index].get("tool_calls"):
            return None
        end = self._tokenizer.detokenize([end_of_turn], skip_special_tokens=False)
        options = replace(self._options, add_generation_prompt=False, continue_final_message=False)
        through = self._format.render_dicts(self._messages[: index + 1], options).text
        if not self.chat.text.startswith(through):
            return None
        shown = through[prompt_end:]
        written, found, _ = answer.partition(calls.opening)
        before = written.rstrip() if found else ""
        begins = shown.startswith(before) and shown[len(before) :].lstrip().startswith(found)
        place = shown.rfind(end)
        if place < 0 or not begins or not answer.rstrip().endswith(calls.closing):
            return None
        return prompt_end + place

    def _read(self, ids: list[int]) -> str:
        """Return the text of ids, without a beginning of document that the rendered text does not spell."""
        text, bos = self._tokenizer.detokenize(ids, skip_special_tokens=False), self._tokenizer.bos
        if bos is None or ids[:1] != [bos]:
            return text
        spelled = self._tokenizer.detokenize([bos], skip_special_tokens=False)
        return text if self.chat.text.startswith(spelled) else text.removeprefix(spelled)


def common_length(one: array[int], other: array[int]) -> int:
    """Return the number of tokens at the start that two sequences have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
