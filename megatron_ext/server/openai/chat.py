"""Chat format: conversations as prompts, and the tokens that end a turn."""

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

_MAX_TURNS = 8  # turns whose ends get snapshots: more would evict those of other conversations
_ANSWER = "0123456789"
_CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]


class ChatFormat:
    """Chat template of a tokenizer, with the tokens that end an answer.

    Args:
        tokenizer: Tokenizer with or without a chat template.
        parse_control: Whether special tokens spelled in messages become these tokens; they stay text otherwise.
    """

    def __init__(self, tokenizer: Tokenizer, *, parse_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._parse_control = parse_control
        if isinstance(tokenizer, TextTokenizer):
            tokenizer.prepare_chat()

    def render(self, messages: Sequence[Message], options: ChatOptions | None = None) -> RenderedChat:
        """Return the prompt for the next answer, or as `options` say.

        Raises:
            ConfigError: There is no template, or it refuses the messages.
        """
        if not isinstance(self._tokenizer, TextTokenizer):
            raise ConfigError("the model's tokenizer has no chat template; use /v1/completions")
        dicts = [message.to_dict() for message in messages]
        rendered = self._tokenizer.render_chat(dicts, parse_control=self._parse_control, options=options)
        self.end_of_turn  # noqa: B018  # rendered here, since the property is read on the event loop later
        return rendered

    @cached_property
    def end_of_turn(self) -> int | None:
        """Special token that the template puts after an answer; None if there is no such token.

        It may differ from the tokenizer's end of document, after which a chat model would not continue with a turn.
        """
        tokenizer = self._tokenizer
        assert isinstance(tokenizer, TextTokenizer), "it has rendered a prompt"
        try:
            text = tokenizer.apply_chat_template(_CONVERSATION, add_generation_prompt=False)
        except ConfigError:  # the template refuses the probe: use the end of document
            return None
        _, answer, suffix = text.rpartition(_ANSWER)
        tokens = [token for token in tokenizer.tokenize(suffix) if token != tokenizer.bos] if answer else []
        is_special = bool(tokens) and not tokenizer.detokenize(tokens[:1]) and suffix.strip() != ""
        return tokens[0] if is_special else None

    def ends_of_turns(self, prompt: Sequence[int]) -> list[int]:
        """Return the number of tokens up to the end of turns: the system prompt's first, then the latest few.

        Other conversations may continue from there. Empty if the template ends turns without a special token; tokens
        spelled in a message end no turn.
        """
        if self.end_of_turn is None:
            return []
        ends: list[int] = []
        with suppress(ValueError):  # no further turn
            while True:
                ends.append(prompt.index(self.end_of_turn, ends[-1] if ends else 0) + 1)
        return [*ends[:1], *reversed(ends[1:])][:_MAX_TURNS]

    @cached_property
    def calls_are_special(self) -> bool:
        """Return whether the tool call markers are special tokens, which decoded text leaves out."""
        tokenizer = self._tokenizer
        if not isinstance(tokenizer, TextTokenizer):
            return False
        tokens = tokenizer.tokenize_plain(OPENING)
        return len(tokens) == 1 and not tokenizer.detokenize(tokens)

    @cached_property
    def other_ends(self) -> tuple[int, ...]:
        """Return the tokens other than `end_of_turn` that end an answer."""
        if self.end_of_turn is None:  # end-of-document tokens end it
            return ()
        return tuple(token for token in ends_of(self._tokenizer) if token != self.end_of_turn)
