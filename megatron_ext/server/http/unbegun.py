"""Requests without the beginning of an answer: at the end of the server each of them gets a 503."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_ext.server.api_errors import shutting_down


class UnbegunAnswers:
    """Requests whose answers have not begun, wherever they wait: for their body, a tokenizer, or the engine."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._has_ended = False

    def end(self) -> None:
        """Answer them with 503."""
        self._has_ended = True
        for task in self._tasks:
            task.cancel()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with its requests noted."""

        async def noted(scope: Scope, receive: Receive, send: Send) -> None:
            task = asyncio.current_task()
            if scope["type"] != "http" or task is None:
                await app(scope, receive, send)
                return

            async def begin(message: Message) -> None:
                self._tasks.discard(task)
                await send(message)

            self._tasks.add(task)
            try:
                await app(scope, receive, begin)
            except asyncio.CancelledError:
                if not self._has_ended:
                    raise
                if task in self._tasks:
                    await shutting_down().to_response()(scope, receive, send)
            finally:
                self._tasks.discard(task)

        return noted
