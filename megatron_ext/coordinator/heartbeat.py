"""What a replica says of itself when it is asked for a sign of life: `GET /replica` of its server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PATH = "/replica"
OK, ASLEEP, FAILING = "ok", "asleep", "failing"


@dataclass(frozen=True)
class EventSource:
    """Where a replica publishes what its cache holds.

    Attributes:
        endpoint: To subscribe to, as ZeroMQ spells it.
        replay: To ask for what was missed; None if nobody can be asked.
        topic: Of the events.
    """

    endpoint: str
    replay: str | None
    topic: str

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it can be read on its own machine alone."""
        return any(one is not None and one.startswith("ipc://") for one in (self.endpoint, self.replay))


@dataclass(frozen=True)
class Heartbeat:
    """One answer.

    Attributes:
        instance: Of the process; another one after a restart.
        status: `OK`, `ASLEEP` or `FAILING`.
        has_keys: Whether it asks for API keys, and binds salts to them.
        block_size: Tokens.
        blocks: Of its KV pool.
        has_states: Whether it resumes at snapshots only.
        capacity: Requests that it takes at once, waiting ones included.
        living: Requests that are there.
        steps: That its engine has computed; grows as long as it is not stuck.
        skipped: Prompt tokens that no layer computed, since its start; None where it does not tell.
        computed: The others.
        events: Where it publishes what it holds, for each data-parallel rank of its world; empty if it does not.
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
        """What an answer says.

        Args:
            content: Its JSON.
            host: Of the replica: what stands for "every address" in where it publishes.

        Raises:
            ValueError: It is not the answer of a replica.
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
    """An endpoint that somebody binds, as others connect to it: `tcp://*:5557` is on the host of its server."""
    for every in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(every):
            return f"tcp://{f'[{host}]' if ':' in host else host}:{endpoint.removeprefix(every)}"
    return endpoint
