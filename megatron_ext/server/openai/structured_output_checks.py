"""Checks of response formats: compiled in a thread, within limits of size and time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.config import ServerLimits
from megatron_ext.config.response_format import LARK, ResponseFormat
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_errors import response_format_refused, response_format_too_long, response_format_too_slow
from megatron_ext.text.grammars import Grammars

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

    async def check(self, form: ResponseFormat | None) -> None:
        """Compile a response format, if there is one and it is not compiled yet.

        Raises:
            ApiError: It is too long, takes too long to compile, or uses unsupported features.
        """
        if form is None:
            return
        kind, param = (_TOOLS, "tools") if form.kind == LARK else (form.kind, "response_format")
        size, limit = len(form.source.encode()), self._limits.schema_bytes
        if size > limit:
            raise response_format_too_long(kind, size, limit, param)
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.check, form)
        try:
            await asyncio.wait_for(compiling, self._limits.grammar_timeout)
        except asyncio.TimeoutError:  # the thread continues until the library's own limits end it
            raise response_format_too_slow(kind, self._limits.grammar_timeout, param) from None
        except ConfigError as error:
            raise response_format_refused(str(error), param) from None
