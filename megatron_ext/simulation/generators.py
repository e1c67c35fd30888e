"""Generated traces: typical traffic of a cache, one function for each kind; equal seeds give equal traces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_ext.simulation.trace import Ids, Pieces, Turn, cut


@dataclass(frozen=True)
class Size:
    """Size of a trace.

    Attributes:
        requests: Minimum number of requests; sessions are whole.
        rate: New sessions per second.
        scale: Factor of all lengths in tokens.
        seed: Seed of all random numbers.
        ids: Source of token ids.
    """

    requests: int = 1000
    rate: float = 1.0
    scale: float = 1.0
    seed: int = 0
    ids: Ids = field(default_factory=Ids, compare=False)


class _Source:
    """Source of random lengths, waits and choices."""

    def __init__(self, size: Size) -> None:
        self.random = random.Random(size.seed)
        self.ids = size.ids
        self._size = size
        self._now = 0.0

    def text(self, low: int, high: int) -> range:
        """Return new tokens of a log-uniform random length between two bounds."""
        length = low * (high / low) ** self.random.random()
        return self.ids.take(max(1, round(length * self._size.scale)))

    def begin(self, bursts: float = 1.0) -> float:
        """Return the start of the next session."""
        self._now += self.random.expovariate(self._size.rate / bursts)
        return self._now

    def think(self, mean: float) -> float:
        """Return the seconds until the next turn of a session."""
        return self.random.expovariate(1 / mean)

    def zipf(self, count: int, exponent: float = 1.0) -> int:
        """Return an index below `count` by Zipf's law: small ones are far more frequent."""
        weights = [(i + 1) ** -exponent for i in range(count)]
        return self.random.choices(range(count), weights)[0]


def _until(requests: int, sessions: Iterator[list[Turn]]) -> list[Turn]:
    turns: list[Turn] = []
    for session in sessions:
        turns += session
        if len(turns) >= requests:
            return turns
    raise AssertionError("generators have no end")


def shared_prefixes(size: Size) -> list[Turn]:
    """Long prompts of a few kinds (templates, few-shot examples), each request with a unique end."""
    source = _Source(size)
    prefixes = [source.text(1024, 8192) for _ in range(32)]

    def sessions() -> Iterator[list[Turn]]:
        session = 0
        while True:
            prompt = (prefixes[source.zipf(len(prefixes))], source.text(64, 1024))
            yield [Turn(session, source.begin(), prompt, source.text(8, 64))]
            session += 1

    return _until(size.requests, sessions())


def chat(size: Size) -> list[Turn]:
    """Conversations with a few system prompts, and a mean pause of half a minute between turns."""
    source = _Source(size)
    systems = [source.text(128, 2048) for _ in range(8)]

    def sessions() -> Iterator[list[Turn]]:
        session = 0
        while True:
            turns = 1 + min(15, int(source.random.expovariate(1 / 4)))
            yield _conversation(source, session, (systems[source.zipf(len(systems))],), turns, (32, 512), 30.0)
            session += 1

    return _until(size.requests, sessions())


def _conversation(
    source: _Source, session: int, opening: Pieces, turns: int, said: tuple[int, int], think: float
) -> list[Turn]:
    history, found = opening, []
    for i in range(turns):
        history = (*history, source.text(*said))
        answer = source.text(16, 256)
        time = source.think(think) if i else source.begin()
        found.append(Turn(session, time, history, answer, is_reply=i > 0))
        history = (*history, answer)
    return found


def agents(size: Size) -> list[Turn]:
    """Coding agents: one long prompt with tools for all, a repository each, many quick turns with outputs of tools.

    One turn in eight edits the history: the text after some point is replaced, and the session continues from there.
    """
    source = _Source(size)
    tools = source.text(4096, 6144)

    def sessions() -> Iterator[list[Turn]]:
        session = 0
        while True:
            yield _agent(source, session, (tools, source.text(512, 4096)), 8 + source.random.randrange(24))
            session += 1

    return _until(size.requests, sessions())


def _agent(source: _Source, session: int, opening: Pieces, turns: int) -> list[Turn]:
    history, found, began = opening, [], len(opening)
    for i in range(turns):
        if len(history) > began + 4 and source.random.random() < 0.125:
            history = history[: source.random.randrange(began + 1, len(history))]
            last = history[-1]  # edited at a random position
            history = cut(history, sum(map(len, history)) - source.random.randrange(len(last)))
        history = (*history, source.text(64, 1536))
        answer = source.text(16, 192)
        found.append(Turn(session, source.think(5.0) if i else source.begin(), history, answer, is_reply=i > 0))
        history = (*history, answer)
    return found


def rl_groups(size: Size) -> list[Turn]:
    """Groups of eight samples of one prompt, a few groups at a time; each prompt comes once in each of two epochs."""
    source = _Source(size)
    prompts = [(source.text(256, 2048),) for _ in range(max(1, size.requests // 16))]

    def sessions() -> Iterator[list[Turn]]:
        session = 0
        while True:
            source.random.shuffle(prompts)
            for prompt in prompts:
                time = source.begin(8.0)
                group = [Turn(session + i, time, prompt, source.text(32, 256)) for i in range(8)]
                session += len(group)
                yield group

    return _until(size.requests, sessions())


def tenants(size: Size) -> list[Turn]:
    """Many tenants by Zipf's law, each with a salt and a system prompt, and short conversations."""
    source = _Source(size)
    systems = [source.text(512, 4096) for _ in range(64)]

    def sessions() -> Iterator[list[Turn]]:
        session = 0
        while True:
            tenant = source.zipf(len(systems))
            turns = _conversation(source, session, (systems[tenant],), 1 + source.random.randrange(3), (32, 512), 20.0)
            yield [replace(turn, salt=f"tenant {tenant}") for turn in turns]
            session += 1

    return _until(size.requests, sessions())


def mixed(size: Size) -> list[Turn]:
    """Mixture of all kinds with an equal number of requests of each, and separate sessions and ids."""
    parts = [shared_prefixes, chat, agents, rl_groups, tenants]
    each = replace(size, requests=max(1, size.requests // len(parts)), rate=size.rate / len(parts))
    ids, turns = size.ids, []
    for i, part in enumerate(parts):
        found = part(replace(each, seed=size.seed + i, ids=ids))
        turns += [replace(turn, session=turn.session * len(parts) + i) for turn in found]
    return turns


GENERATORS: dict[str, Callable[[Size], Sequence[Turn]]] = {
    "shared": shared_prefixes,
    "chat": chat,
    "agents": agents,
    "rl": rl_groups,
    "tenants": tenants,
    "mixed": mixed,
}
