"""Requests that stay in progress for as long as a test looks at them, however fast or slow the machine is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from megatron_ext.engine.client import EngineClient
from megatron_ext.errors import EngineClosed

PATIENCE = 60.0  # seconds until a test gives up; nothing is measured


@contextlib.contextmanager
def held_steps(client: EngineClient, requests: int | None = None, tokens: int = 1) -> Iterator[contextlib.ExitStack]:
    """Take no step while enough requests have begun to generate, until the block ends or `close` is called.

    Calls between two steps are made meanwhile: requests come in, are aborted, the engine sleeps. Requests that have
    ended or that are abandoned are not counted.

    Args:
        client: Client of the engine, which steps by itself.
        requests: Number of requests that stops the steps; by default all, so that each new one begins, too.
        tokens: Generated tokens from which on a request has begun.
    """
    submit_step = client._submit_step

    def submit_unless_held() -> None:
        living = [one.request for one in client._pending.values() if not (one.is_abandoned or one.request.is_ended)]
        begun = sum(request.generated_count >= tokens for request in living)
        if not living or begun < (len(living) if requests is None else requests):
            submit_step()

    def release() -> None:
        with contextlib.suppress(EngineClosed):
            client.call(lambda: None).result(PATIENCE)

    with contextlib.ExitStack() as holding:
        holding.callback(release)
        holding.enter_context(mock.patch.object(client, "_submit_step", submit_unless_held))
        yield holding
