"""Conversations as prompts, and where an answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.protocol import Message
from megatron_ext.server.openai.tool_calls import OPENING
from megatron_ext.text.chat_template import ChatOptions
from megatron_ext.text.chat_tokens import RenderedChat
from megatron_ext.text.tokenizer import TextTokenizer, Tokenizer, ends_of

_MAX_TURNS = 8  # whose ends are where others may go on: more would take the slots of other conversations
_ANSWER = "0123456789"
_CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]


class ChatFormat:
    """What a tokenizer's chat template says.

    Args:
        tokenizer: With a chat template or without.
        parse_control: Whether special tokens that messages spell are these tokens, or text.
    """

    def __init__(self, tokenizer: Tokenizer, *, parse_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._parse_control = parse_control
        if isinstance(tokenizer, TextTokenizer):
            tokenizer.prepare_chat()

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> RenderedChat:
        """The prompt that asks for the next answer, or for what `options` say.

        Raises:
            ConfigError: No template, or messages that it refuses.
        """
        if not isinstance(self._tokenizer, TextTokenizer):
            raise ConfigError("the model's tokenizer has no chat template; use /v1/completions")
        dicts = [message.to_dict() for message in messages]
        rendered = self._tokenizer.render_chat(dicts, parse_control=self._parse_control, options=options)
        self.end_of_turn  # noqa: B018  # renders, too, and must not do so on the event loop, where it is read
        return rendered

    @cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template puts behind an answer; None if it puts none.

        Not always the tokenizer's end of a document: a model of conversations goes on to the next turn.
        """
        tokenizer = self._tokenizer
        assert isinstance(tokenizer, TextTokenizer), "it has rendered a prompt"
        try:
            text = tokenizer.apply_chat_template(_CONVERSATION, add_generation_prompt=False)
        except ConfigError:  # a template of its own mind; the end of a document it is
            return None
        _, answer, behind = text.rpartition(_ANSWER)
        tokens = [token for token in tokenizer.tokenize(behind) if token != tokenizer.bos] if answer else []
        is_special = bool(tokens) and not tokenizer.detokenize(tokens[:1]) and behind.strip() != ""
        return tokens[0] if is_special else None

    def ends_of_turns(self, prompt: Sequence[int]) -> list[int]:
        """Tokens of a rendered conversation up to the end of each turn: the system prompt's first, then the latest few.

        Others may go on from there. None of a template whose turns end without a special token; what a message spells
        ends none.
        """
        if self.end_of_turn is None:
            return []
        ends: list[int] = []
        with suppress(ValueError):  # there are no more
            while True:
                ends.append(prompt.index(self.end_of_turn, ends[-1] if ends else 0) + 1)
        return [*ends[:1], *reversed(ends[1:])][:_MAX_TURNS]

    @cached_property
    def calls_are_special(self) -> bool:
        """Whether the marks around calls of tools are special tokens, which texts are without."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, TextTokenizer):
            return False
        tokens = tokenizer.tokenize_plain(OPENING)
        return len(tokens) == 1 and not tokenizer.detokenize(tokens)

    @cached_property
    def other_ends(self) -> tuple[int, ...]:
        """What ends an answer beside `end_of_turn`."""
        if self.end_of_turn is None:  # the ends of a document are what ends it
            return ()
        return tuple(token for token in ends_of(self._tokenizer) if token != self.end_of_turn)
