"""Structured output: formats compiled in a thread within limits, and one grammar of an answer's calls and thinking."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron_ext.config import ServerLimits
from megatron_ext.config.request import JSON_OBJECT, JSON_SCHEMA, LARK, ResponseFormat, ThinkingBudget
from megatron_ext.config.server import KB
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_errors import ApiError
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import ChatRequest
from megatron_ext.server.openai.request_fields import note_ignored
from megatron_ext.text.grammars import Grammars, supported_part
from megatron_ext.text.tool_calls.formats import AnswerFormat, grammar_of
from megatron_ext.text.tool_calls.functions import ANY_OBJECT, Function

Result = TypeVar("Result")
THREADS = 2
_TOOLS = "grammar of the tools"


class StructuredOutputChecks:
    """Compiler of response formats ahead of the engine, which then finds the compiled grammar.

    Args:
        grammars: The engine's grammar compiler.
        limits: Limits of sizes and times.
    """

    def __init__(self, grammars: Grammars, limits: ServerLimits) -> None:
        self._grammars = grammars
        self._limits = limits
        self._threads = ThreadPoolExecutor(THREADS, "grammars")

    async def check(self, response_format: ResponseFormat | None) -> None:
        """Compile a response format, if there is one and it is not compiled yet.

        Raises:
            ApiError: It is too long, takes too long to compile, or uses unsupported features.
        """
        if response_format is None:
            return
        kind, param = (_TOOLS, "tools") if response_format.kind == LARK else (response_format.kind, "response_format")
        self._check_size(len(response_format.source.encode()), kind, param)
        await self._run(partial(self._grammars.check, response_format), kind, param)

    async def supported(self, functions: Sequence[Function], *, must_call: bool) -> tuple[Function, ...]:
        """Return functions with schemas that can guide calls: the supported part, unless a function is strict.

        Args:
            functions: Functions that may be called.
            must_call: Whether the answer is a call, so that each schema guides it.

        Raises:
            ApiError: The schema of a strict function has parts that are not supported, or schemas are too long.
        """
        guiding = [one for one in functions if must_call or one.is_strict]
        if not guiding or importlib.util.find_spec("llguidance") is None:
            return tuple(functions)
        self._check_size(sum(len(json.dumps(one.schema)) for one in guiding), _TOOLS, "tools")
        found = await self._run(partial(_supported, guiding), _TOOLS, "tools")
        return tuple(found.get(one.name, one) for one in functions)

    def _check_size(self, size: int, kind: str, param: str) -> None:
        limit = int(self._limits.max_schema_kb * KB)
        if size > limit:
            message = f"the {kind} has {size} bytes; this server accepts at most {limit} (--max-schema-kb)"
            raise ApiError(400, message, param=param, code="schema_too_long")

    async def _run(self, function: Callable[[], Result], kind: str, param: str) -> Result:
        running = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.wait_for(running, self._limits.grammar_timeout)
        except asyncio.TimeoutError:  # the thread continues until the library's own limits end it
            seconds = f"{self._limits.grammar_timeout:g} s (--grammar-timeout)"
            message = f"the {kind} was not compiled within {seconds}; send a simpler one"
            raise ApiError(400, message, param=param, code="schema_too_slow") from None
        except ConfigError as error:
            logged = f"{param}: has features that are not supported"  # the message has the client's text
            raise ApiError(400, str(error), param=param, code="schema_not_supported", logged=logged) from None


def _supported(functions: Sequence[Function]) -> dict[str, Function]:
    """Return functions by name, with the supported part of their schemas; the log notes once that there is more.

    Raises:
        ConfigError: A strict function needs the whole.
    """
    found = {}
    for one in functions:
        schema, reason = supported_part(one.schema)
        if reason and one.is_strict:
            raise ConfigError(
                f"tools: the parameters of the strict function {one.name!r} cannot be enforced ({reason}); leave that "
                "out, or `strict`"
            )
        if reason:
            note_ignored("parts of a tool's schema")
        found[one.name] = replace(one, schema=schema)
    return found


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
    reasoning, budget = answer_format.reasoning, None
    if limit is not None and reasoning is not None:
        budget = ThinkingBudget(limit, reasoning.closing, None if answer_format.begins_inside else reasoning.opening)
    grammar = grammar_of(answer_format, chat.token_of, must_call=must_call, schema=schema)
    return ResponseFormat(LARK, grammar, budget)
