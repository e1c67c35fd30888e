"""Prompts of conversations that continue from the token ids of an earlier answer (`answer_memory`).

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

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.answer_memory import (
    AnsweredChat,
    Calls,
    content_and_calls,
    digest_of,
    hash_message,
    hash_messages,
    hash_scope,
    read_answer,
)
from megatron_ext.server.openai.answers import AnswerFormat
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import MAX_CALLS
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import ASSISTANT, RenderedChat
from megatron_ext.text.tokenizer import begin_once
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function

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
        return replace(found, retokenized=_retokenized(found.ids, answered[0][1])) if answered else found

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
        functions = tuple(map(_function_of, self._options.tools))
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


def _function_of(tool: Mapping[str, Any]) -> Function:
    function = tool["function"]
    return Function(function["name"], function.get("parameters") or ANY_OBJECT)


def _retokenized(ids: Sequence[int], known: AnsweredChat) -> tuple[int, int] | None:
    """Return the range of an answered conversation's tokens that a prompt has as other tokens."""
    start = common_length(array("i", ids), known.ids)
    return (start, len(known.ids)) if start < len(known.ids) else None


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
