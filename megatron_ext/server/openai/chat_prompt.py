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
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.answer_memory import AnsweredChat, content_and_calls, hash_messages, read_answer
from megatron_ext.server.openai.answers import AnswerFormat
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import MAX_CALLS
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import RenderedChat
from megatron_ext.text.prompt_tokenization import begin_once
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function


class ChatPrompt:
    """Prompt of a conversation, as text and then as token ids.

    Args:
        messages: Messages as for the chat template.
        scope: Tenant and cache salt, whose answers it may continue.
        chat_format: Chat template and tokens of the model.
        options: Template options.
        ids: Token ids, if they are known.

    Attributes:
        hashes: Hash through each message.
        given: Answered conversations that the request itself has, with the index of the answer: at most one.
        ids: Token ids; empty until `tokenize` has computed them.
        answer: Key of the answer whose conversation the ids begin with; None without one.
        retokenized: Positions [start, end) at which an earlier turn has other tokens; None for no such positions.
    """

    def __init__(
        self,
        messages: Sequence[dict[str, object]],
        scope: str | None,
        chat_format: ChatFormat,
        options: ChatOptions,
        ids: Sequence[int] = (),
    ) -> None:
        self.messages, self.ids = messages, list(ids)
        self.hashes = hash_messages(scope, messages)
        self.given: list[tuple[int, AnsweredChat]] = []
        self.answer: bytes | None = None
        self.retokenized: tuple[int, int] | None = None
        self._format, self._options = chat_format, options
        self._tokenizer = chat_format.tokenizer

    @cached_property
    def chat(self) -> RenderedChat:
        """The rendered conversation.

        Raises:
            ConfigError: See `ChatFormat.render_dicts`.
        """
        return self._format.render_dicts(self.messages, self._options)

    def take(self, index: int, prompt_ids: Sequence[int], generation_ids: Sequence[int]) -> None:
        """Take the token ids that a message of the assistant carries, as Megatron's servers return them.

        Args:
            index: Index of the message.
            prompt_ids: Ids of the conversation before it.
            generation_ids: Ids of the message, as it was generated.

        Raises:
            ConfigError: The ids do not read as the conversation or do not give the message's fields.
        """
        options = replace(self._options, add_generation_prompt=True, continue_final_message=False)
        before = self._format.render_dicts(self.messages[:index], options).text if index else ""
        if self._read(list(prompt_ids)) != before:
            raise ConfigError(f"messages.{index}.prompt_token_ids do not read as the conversation before the message")
        text = self._tokenizer.detokenize(list(generation_ids), skip_special_tokens=not self._format.reads_special)
        message = self.messages[index]
        functions = tuple(map(_function_of, self._options.tools))
        inside = self._format.ends_inside_thinking(prompt_ids)
        for reasoning in dict.fromkeys((self._format.reasoning, None)):  # with and without `separate_reasoning`
            form = AnswerFormat(self._format.tool_calls, functions, len(functions) and MAX_CALLS, reasoning, inside)
            thinking, content, calls = read_answer(text, "stop", form)
            sent, sent_calls = content_and_calls(message)
            if (content.strip(), calls) == (sent.strip(), sent_calls) and message.get("reasoning_content") in (
                None,
                thinking,
            ):
                self.given = [(index, AnsweredChat.of(prompt_ids, generation_ids, self._format.ends))]
                return
        raise ConfigError(f"messages.{index}.generation_token_ids do not give the fields of the message")

    def tokenize(self, answered: Sequence[tuple[int, AnsweredChat]]) -> None:
        """Compute the ids.

        Args:
            answered: Answered conversations that it may continue, by the index of the answer, the last one first.
        """
        for index, known in answered:
            ids = self._continued(index, known)
            if ids is not None:
                self.ids, self.answer = ids, self.hashes[index].digest()
                break
        else:
            self.ids = begin_once(self.chat.ids(), self._tokenizer.bos)
        if answered and (self.answer is None or known is not answered[0][1]):
            self.retokenized = _retokenized(self.ids, answered[0][1])

    def _continued(self, index: int, known: AnsweredChat) -> list[int] | None:
        """Return the ids that continue an answered conversation; None if its text is not the rendered one."""
        ids, text = known.ids.tolist(), self.chat.text
        known_text = self._read(ids)
        if text.startswith(known_text):
            start, expected = len(known_text), text
        else:
            found = self._after_calls(index, known, known_text)
            if found is None:
                return None
            start, expected = found, known_text + text[found:]
        ids += self.chat.ids_from(start)
        return ids if self._read(ids) == expected else None

    def _after_calls(self, index: int, known: AnsweredChat, known_text: str) -> int | None:
        """Return where the rendered text continues after an answer whose calls it spells in another way.

        The messages before the answer and the text before its calls are unchanged; the calls are equal as values, since
        the key of the answer covers them. None if anything else differs.
        """
        calls = self._format.tool_calls
        prompt = self._read(known.ids[: known.prompt_length].tolist())
        end_of_turn = self._format.end_of_turn
        if end_of_turn is None or not self.messages[index].get("tool_calls"):
            return None
        end = self._tokenizer.detokenize([end_of_turn], skip_special_tokens=False)
        options = replace(self._options, add_generation_prompt=False, continue_final_message=False)
        through = self._format.render_dicts(self.messages[: index + 1], options).text
        if not (self.chat.text.startswith(through) and through.startswith(prompt) and known_text.startswith(prompt)):
            return None
        answer, shown = known_text[len(prompt) :], through[len(prompt) :]
        written, found, _ = answer.partition(calls.opening)
        before = written.rstrip() if found else ""
        begins = shown.startswith(before) and shown[len(before) :].lstrip().startswith(found)
        place = shown.rfind(end)
        if place < 0 or not begins or not answer.rstrip().endswith(calls.closing):
            return None
        return len(prompt) + place

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
