"""Load generators: a fixed number of concurrent clients (closed loop), or a fixed arrival rate (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.bench.clients import AskError, Client, PendingOutput
from megatron_ext.bench.work import Dialogue

Talk: TypeAlias = Callable[[Dialogue], Coroutine[object, None, None]]


@dataclass(frozen=True)
class Pace:
    """Rate at which dialogues begin.

    Attributes:
        concurrency: Concurrent dialogues; used without a rate.
        rate: Dialogues that begin in a second on average, at random times, whatever is still being answered; None for
            `concurrency`.
        seed: Seed of the random times.
    """

    concurrency: int = 8
    rate: float | None = None
    seed: int = 1


async def serve(
    client: Client,
    kind: str,
    asked: Sequence[Dialogue],
    count: int,
    pace: Pace,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[list[PendingOutput], float]:
    """Send all requests of one kind of work.

    Args:
        client: Client to send them with.
        kind: Kind of work, noted in each answer.
        asked: Dialogues to serve.
        count: Tokens of each answer.
        pace: Arrival of the dialogues.
        on_end: Called at the end of each dialogue.

    Returns:
        All answers, failed ones included, and the duration in seconds.
    """
    answers: list[PendingOutput] = []
    begun = time.perf_counter()

    async def talk(dialogue: Dialogue) -> None:
        said: list[str] = []
        for prompt in dialogue.prompts(said):
            answer = PendingOutput(kind)
            answers.append(answer)
            try:
                await client.ask(prompt, count, answer)
            except AskError as error:
                answer.error = str(error)
            answer.ended = time.perf_counter()
            if answer.error is not None:
                break
            said.append(answer.text)
        on_end()

    if pace.rate is None:
        await _closed_loop(asked, pace.concurrency, talk)
    else:
        await _open_loop(asked, pace.rate, random.Random(pace.seed), talk)
    return answers, time.perf_counter() - begun


async def _closed_loop(asked: Sequence[Dialogue], concurrency: int, talk: Talk) -> None:
    waiting = iter(asked)

    async def work() -> None:
        for dialogue in waiting:
            await talk(dialogue)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(asked)))))


async def _open_loop(asked: Sequence[Dialogue], rate: float, source: random.Random, talk: Talk) -> None:
    """Start dialogues after exponential intervals, as independent clients do."""
    tasks, due = [], time.perf_counter()
    for dialogue in asked:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(talk(dialogue)))
        due += source.expovariate(rate)
    await asyncio.gather(*tasks)
