"""Heartbeat of a replica: the answer of `GET /replica`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PATH = "/replica"
OK, ASLEEP, FAILING = "ok", "asleep", "failing"


@dataclass(frozen=True)
class EventSource:
    """Addresses of a cache's KV events.

    Attributes:
        endpoint: Address to subscribe to, as ZeroMQ spells it.
        replay: Address of replays; None without replays.
        topic: Topic of the events.
    """

    endpoint: str
    replay: str | None
    topic: str

    @property
    def is_of_this_machine(self) -> bool:
        """True if the addresses are reachable on their own machine only."""
        return any(one is not None and one.startswith("ipc://") for one in (self.endpoint, self.replay))


@dataclass(frozen=True)
class Heartbeat:
    """Answer of `GET /replica`.

    Attributes:
        instance: Identifier of the process; changes with a restart.
        status: `OK`, `ASLEEP` or `FAILING`.
        has_keys: Whether the replica needs API keys, and binds salts to them.
        block_size: Tokens of a block.
        blocks: Blocks of the KV pool.
        has_states: Whether the replica resumes at snapshots only.
        capacity: Maximum number of requests, waiting ones included.
        living: Current number of requests.
        steps: Steps that the engine has computed; grows unless the engine is stuck.
        skipped: Prompt tokens skipped through the cache since the start; None if hidden.
        computed: Prompt tokens computed since the start; None if hidden.
        events: Event sources, one for each data-parallel rank of the replica's world; empty without events.
    """

    instance: str
    model: str
    status: str
    has_keys: bool
    block_size: int
    blocks: int
    has_states: bool
    capacity: int
    living: int
    steps: int
    skipped: int | None
    computed: int | None
    events: tuple[EventSource, ...]

    @classmethod
    def of(cls, content: object, host: str) -> Heartbeat:
        """Parse an answer.

        Args:
            content: Parsed JSON.
            host: Host of the replica, which replaces a wildcard in its addresses.

        Raises:
            ValueError: The content is not the answer of a replica.
        """
        try:
            assert isinstance(content, dict)
            tokens = content["prompt_tokens"] or {}
            return cls(
                instance=str(content["instance"]),
                model=str(content["model"]),
                status=str(content["status"]),
                has_keys=bool(content["has_keys"]),
                block_size=_positive(content["block_size"]),
                blocks=_positive(content["blocks"]),
                has_states=bool(content["has_states"]),
                capacity=_positive(content["capacity"]),
                living=int(content["living"]),
                steps=int(content["steps"]),
                skipped=tokens.get("skipped"),
                computed=tokens.get("computed"),
                events=tuple(_source(one, host) for one in content.get("kv_events") or ()),
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"GET {PATH} does not answer as a replica does ({type(error).__name__}: {error})"
            ) from None


def _positive(value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no positive number")
    return value


def _source(events: Mapping[str, object], host: str) -> EventSource:
    endpoint, replay = str(events["endpoint"]), events.get("replay")
    return EventSource(
        reachable(endpoint, host), None if not replay else reachable(str(replay), host), str(events.get("topic") or "")
    )


def reachable(endpoint: str, host: str) -> str:
    """Return the address to connect to for a bound endpoint: `tcp://*:5557` is on the host of its server."""
    for every in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(every):
            return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.removeprefix(every)}"
    return endpoint
