"""Checks of response formats: compiled in a thread, within limits of size and time."""

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
from megatron_ext.config.response_format import LARK, ResponseFormat
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_errors import response_format_refused, response_format_too_long, response_format_too_slow
from megatron_ext.server.unknown_fields import note_ignored
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.schema_support import supported_part
from megatron_ext.text.tool_calls.functions import Function

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
        limit = self._limits.schema_bytes
        if size > limit:
            raise response_format_too_long(kind, size, limit, param)

    async def _run(self, function: Callable[[], Result], kind: str, param: str) -> Result:
        running = asyncio.get_running_loop().run_in_executor(self._threads, function)
        try:
            return await asyncio.wait_for(running, self._limits.grammar_timeout)
        except asyncio.TimeoutError:  # the thread continues until the library's own limits end it
            raise response_format_too_slow(kind, self._limits.grammar_timeout, param) from None
        except ConfigError as error:
            raise response_format_refused(str(error), param) from None


def _supported(functions: Sequence[Function]) -> dict[str, Function]:
    """Return functions by name, with the part of their schemas that is supported; the log names the rest once.

    Raises:
        ConfigError: A strict function needs the whole.
    """
    found = {}
    for one in functions:
        schema, unsupported = supported_part(one.schema)
        if unsupported and one.is_strict:
            raise ConfigError(
                f"tools: the parameters of the strict function {one.name!r} cannot be enforced at {unsupported[0]}; "
                "leave that out, or `strict`"
            )
        for part in unsupported:
            note_ignored(f"{part.path.rpartition('.')[2] or 'all'} of a tool's schema")
        found[one.name] = replace(one, schema=schema)
    return found
