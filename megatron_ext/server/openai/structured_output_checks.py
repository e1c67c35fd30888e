"""Forms of answers, looked at and compiled beside the event loop and the engine, within bounds."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from megatron_ext.config import ServerLimits
from megatron_ext.config.response_format import ResponseFormat
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_errors import response_format_refused, response_format_too_long, response_format_too_slow
from megatron_ext.text.grammars import Grammars

THREADS = 2


class StructuredOutputChecks:
    """Sees that answers can be given a form, before anything is asked of the engine, which finds it compiled then.

    Args:
        grammars: The engine's.
        limits: Of sizes and times.
    """

    def __init__(self, grammars: Grammars, limits: ServerLimits) -> None:
        self._grammars = grammars
        self._limits = limits
        self._threads = ThreadPoolExecutor(THREADS, "grammars")

    async def check(self, form: ResponseFormat | None) -> None:
        """Compile a form, if there is one and nobody has.

        Raises:
            ApiError: It is too long, takes too long, or has what cannot be followed.
        """
        if form is None:
            return
        size, most = len(form.source.encode()), self._limits.schema_bytes
        if size > most:
            raise response_format_too_long(form.kind, size, most)
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.check, form)
        try:
            await asyncio.wait_for(compiling, self._limits.grammar_timeout)
        except asyncio.TimeoutError:  # the thread goes on; the library's own limits end it
            raise response_format_too_slow(form.kind, self._limits.grammar_timeout) from None
        except ConfigError as error:
            raise response_format_refused(str(error)) from None
