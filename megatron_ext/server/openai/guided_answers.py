"""Guidance of chat answers: which calls, which thinking and which text a request allows, as one grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatron_ext.config.response_format import JSON_OBJECT, JSON_SCHEMA, LARK, ResponseFormat, ThinkingBudget
from megatron_ext.errors import ConfigError
from megatron_ext.server.openai.answers import AnswerFormat
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import MAX_CALLS, ChatRequest
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function
from megatron_ext.text.tool_calls.grammar import Guidance, grammar_of


def answer_format_of(body: ChatRequest, prompt: Sequence[int], chat: ChatFormat) -> AnswerFormat:
    """Return the format in which the model answers a request.

    Args:
        body: Request.
        prompt: Tokens of the rendered conversation.
        chat: Chat format of the model.
    """
    reasoning = None if body.separate_reasoning is False else chat.reasoning
    functions = tuple(
        Function(tool.function.name, tool.function.parameters or ANY_OBJECT, bool(tool.function.strict))
        for tool in body.callable_tools
    )
    inside = reasoning is not None and chat.ends_inside_thinking(prompt)
    return AnswerFormat(chat.tool_calls, functions, body.max_calls, reasoning, inside)


def constrained_format(body: ChatRequest, answer_format: AnswerFormat, chat: ChatFormat) -> ResponseFormat | None:
    """Return the response format that makes an answer what the request asks for; None if any text is allowed.

    Raises:
        ConfigError: The request limits the thinking of a model that does not think, or combines calls with a response
            format that cannot be told from them.
    """
    given, limit = body.enforced_format, body.thinking_budget_tokens
    must_call = body.tool_choice.mode == "required"
    if limit is not None and answer_format.reasoning is None:
        raise ConfigError("thinking_budget_tokens: this model's chat template has no thinking; leave it out")
    is_guided = must_call or any(function.is_strict for function in answer_format.functions) or limit is not None
    # Without calls or thinking, the format is enforced as it is; beside them it becomes a part of one grammar.
    if not is_guided and not (given is not None and (answer_format.functions or answer_format.begins_inside)):
        return given
    if given is not None and given.kind not in (JSON_OBJECT, JSON_SCHEMA):
        raise ConfigError(
            f"a response format of kind {given.kind} cannot be combined with tools or thinking; leave one of them out, "
            "or give a JSON schema"
        )
    if given is not None and answer_format.functions and answer_format.calls.bare == "{":
        raise ConfigError(
            "tools cannot be combined with a response format where calls are written as by "
            f"{answer_format.calls.name}: both are bare JSON; leave one of them out"
        )
    schema = None if given is None else json.loads(given.source) if given.source else ANY_OBJECT
    reasoning = answer_format.reasoning
    guidance = Guidance(
        functions=answer_format.functions,
        must_call=must_call,
        is_parallel=answer_format.max_calls == MAX_CALLS,
        answer=schema,
        thinking=None if reasoning is None else reasoning.closing,
        thinking_opening="" if reasoning is None else reasoning.opening,
        has_begun_thinking=answer_format.begins_inside,
    )
    budget = None
    if limit is not None and reasoning is not None:
        budget = ThinkingBudget(limit, reasoning.closing, None if answer_format.begins_inside else reasoning.opening)
    return ResponseFormat(LARK, grammar_of(guidance, answer_format.calls, chat.token_of), budget)
