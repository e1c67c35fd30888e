"""Chat format: conversations as prompts, and the tokens that end a turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from megatron_ext.errors import ConfigError
from megatron_ext.text import reasoning
from megatron_ext.text.chat_template import ChatOptions, takes_tools
from megatron_ext.text.chat_tokens import RenderedChat
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer, Tokenizer, ends_of
from megatron_ext.text.tool_calls import formats

logger = logging.getLogger(__name__)

_MAX_TURNS = 8  # turns whose ends get snapshots: more would evict other conversations' snapshots
_ANSWER = "0123456789"
_TAIL = 16  # tokens of a prompt's end that may be a marker
AUTO, NONE = "auto", "none"
_GENERIC = (
    "the chat template has no tools: requests with tools get them described in the system message, and calls are read "
    "as by --tool-call-parser hermes; --chat-template FILE gives another template"
)
_REFUSED = (
    "the chat template has no tools, and --tool-call-parser %s reads no calls of the generic form: requests with tools "
    "are refused; leave it out, or give --chat-template FILE"
)
_CONVERSATION = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _ANSWER}]


class ChatFormat:
    """Chat template of a tokenizer, with the tokens that end an answer.

    Args:
        tokenizer: Tokenizer with or without a chat template.
        parse_control: Whether special tokens spelled in messages become these tokens; they stay text otherwise.
        tool_calls: Name of the format of tool calls, or "auto" to find it in the chat template.
        reasoning_name: Name of the format of thinking, "auto" to find it in the chat template, or "none".

    Raises:
        ConfigError: A format of this name is not known.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, parse_control: bool = False, tool_calls: str = AUTO, reasoning_name: str = AUTO
    ) -> None:
        self.tokenizer = tokenizer
        self._parse_control = parse_control
        template = _template_of(tokenizer, has_tools=True)
        self._refuses_tools = False
        if template is not None and not takes_tools(template):
            self._refuses_tools = tool_calls not in (AUTO, formats.HERMES.name)
            if self._refuses_tools:
                logger.warning(_REFUSED, tool_calls)
            else:
                logger.info(_GENERIC)
            template = None  # its own form of calls is not used
        self.tool_calls = (
            formats.format_of(template) if tool_calls == AUTO else formats.format_named(tool_calls, template)
        )
        self.reasoning: reasoning.ReasoningFormat | None = None
        if reasoning_name == AUTO:
            self.reasoning = reasoning.format_of(_template_of(tokenizer, has_tools=False))
        elif reasoning_name != NONE:
            self.reasoning = reasoning.format_named(reasoning_name)
        if isinstance(tokenizer, TextTokenizer):
            tokenizer.prepare_chat()

    def render_dicts(self, messages: Sequence[dict[str, object]], options: ChatOptions | None = None) -> RenderedChat:
        """Return the prompt of messages in the form of chat templates.

        Raises:
            ConfigError: There is no template, or it refuses the messages or the tools.
        """
        if isinstance(self.tokenizer, NullTokenizer) and self.tokenizer.problem:
            raise ConfigError(self.tokenizer.problem)
        if not isinstance(self.tokenizer, TextTokenizer):
            raise ConfigError("the model's tokenizer has no chat template; use /v1/completions")
        if self._refuses_tools and options is not None and options.tools:
            raise ConfigError("tools: the model's chat template has none, and its --tool-call-parser is not hermes")
        rendered = self.tokenizer.render_chat(messages, parse_control=self._parse_control, options=options)
        self.end_of_turn  # noqa: B018  # rendered here, since the property is read on the event loop later
        return rendered

    @cached_property
    def end_of_turn(self) -> int | None:
        """Special token that the template puts after an answer; None if there is no such token.

        It may differ from the tokenizer's end of document, after which a chat model would not continue with a turn.
        """
        tokenizer = self.tokenizer
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

    def token_of(self, text: str) -> int | None:
        """Return the id of the single token that a text is; None if it is several."""
        tokenizer = self.tokenizer
        tokens = tokenizer.tokenize_plain(text) if isinstance(tokenizer, TextTokenizer) and text else []
        return tokens[0] if len(tokens) == 1 else None

    @cached_property
    def calls_are_special(self) -> bool:
        """Return whether the tool call markers are special tokens, which decoded text leaves out."""
        return any(map(self._is_special, (self.tool_calls.opening, self.tool_calls.closing)))

    @cached_property
    def thinking_is_special(self) -> bool:
        """Return whether the markers of thinking are special tokens, which decoded text leaves out."""
        markers = self.reasoning
        return markers is not None and any(map(self._is_special, (markers.opening, markers.closing)))

    def _is_special(self, text: str) -> bool:
        token = self.token_of(text)
        return token is not None and not self.tokenizer.detokenize([token])

    def ends_inside_thinking(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with the beginning of thinking."""
        if self.reasoning is None or not isinstance(self.tokenizer, TextTokenizer):
            return False
        tail = self.tokenizer.detokenize(list(prompt[-_TAIL:]), skip_special_tokens=False)
        return reasoning.begins_inside(tail, self.reasoning)

    @cached_property
    def thinking_token(self) -> int | None:
        """First token of the marker that begins thinking; None without such a marker."""
        tokenizer = self.tokenizer
        if self.reasoning is None or not isinstance(tokenizer, TextTokenizer):
            return None
        return tokenizer.tokenize_plain(self.reasoning.opening)[0]

    @property
    def ends(self) -> tuple[int | None, ...]:
        """Tokens that may end an answer."""
        return (self.end_of_turn, *ends_of(self.tokenizer))

    @cached_property
    def other_ends(self) -> tuple[int, ...]:
        """Return the tokens other than `end_of_turn` that end an answer."""
        if self.end_of_turn is None:  # end-of-document tokens end it
            return ()
        return tuple(token for token in ends_of(self.tokenizer) if token != self.end_of_turn)


def _template_of(tokenizer: Tokenizer, *, has_tools: bool) -> str | None:
    """Return the chat template; None without one, and if it cannot be read, which its first use reports."""
    if not isinstance(tokenizer, TextTokenizer):
        return None
    try:
        return tokenizer.chat_templates.chosen(has_tools=has_tools)
    except ConfigError:
        return None
