"""Heartbeat of a replica: the answer of `GET /replica`, and the one place where it is validated.

A replica may be faulty, of another version, or not a replica at all. Nothing of its answer is used before all of it has
the expected types and bounds, so that it cannot fail requests of others. Addresses of KV events at other places than
the replica's own are left out, and the replica counts as one without events.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.coordinator import socket_directory
from megatron_ext.config.fleet_limits import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_EVENT_SOURCES,
    MAX_NAME,
    MAX_NAMES,
    MAX_REQUESTS,
    MAX_SHOWN,
)
from megatron_ext.config.hosts import ANY_HOST, is_loopback
from megatron_ext.config.kv_events import LONGEST_SOCKET_PATH, IpcEndpoint, TcpEndpoint, parse_endpoint

PATH = "/replica"
OK, ASLEEP, PAUSED, FAILING = "ok", "asleep", "paused", "failing"
_ALL_NETWORKS = ("*", "0.0.0.0", "[::]")


class BadHeartbeat(ValueError):
    """Answer that a replica does not give; the message names the field."""


@dataclass(frozen=True)
class EventSource:
    """Addresses of a cache's KV events.

    Attributes:
        endpoint: Address to subscribe to for events of blocks, as ZeroMQ spells it.
        replay: Address of their replays; None without replays.
        topic: Topic of the events.
        states: Address to subscribe to for events of states; None if the replica does not publish them.
        states_replay: Address of their replays; None without replays.
    """

    endpoint: str
    replay: str | None
    topic: str
    states: str | None = None
    states_replay: str | None = None


@dataclass(frozen=True)
class EventPlaces:
    """Places where a replica may publish KV events: its own host, and what the coordinator allows.

    Attributes:
        host: Host of the replica, which replaces a wildcard in its addresses.
        allowed: Other hosts, `*` for any, and directories of sockets as `ipc:///DIRECTORY`.
        sockets: Directory that a coordinator made for the replica's sockets when it launched it; None without one.
    """

    host: str
    allowed: tuple[str, ...] = ()
    sockets: Path | None = None

    def address(self, text: object) -> str:
        """Return the address to connect to.

        Raises:
            BadHeartbeat: It is not an address of this replica.
        """
        endpoint = parse_endpoint(text) if isinstance(text, str) and len(text) <= MAX_NAME else None
        if endpoint is None:
            raise BadHeartbeat(f"{_shown(text)} is no address of KV events")
        return self._socket(endpoint) if isinstance(endpoint, IpcEndpoint) else self._tcp(endpoint)

    def _tcp(self, endpoint: TcpEndpoint) -> str:
        if not endpoint.port:
            raise BadHeartbeat(f"tcp://{endpoint.host}:0 has no port")
        if endpoint.host in _ALL_NETWORKS:
            return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{endpoint.port}"
        if not self._has_host(endpoint.host):
            raise BadHeartbeat(
                f"tcp://{endpoint.host}:{endpoint.port} is not on the replica's own host {self.host}; "
                f"--allowed-event-sources {endpoint.host} allows it"
            )
        return f"tcp://{endpoint.host}:{endpoint.port}"

    def _has_host(self, host: str) -> bool:
        hosts = {one.strip("[]").lower() for one in (self.host, *self.allowed)}
        name = host.strip("[]").lower()
        return name in hosts or ANY_HOST in hosts or (is_loopback(name) and is_loopback(self.host))

    def _socket(self, endpoint: IpcEndpoint) -> str:
        path = Path(endpoint.path)
        directories = [one for one in map(socket_directory, self.allowed) if one is not None]
        if self.sockets is not None:
            directories.append(self.sockets)
        is_allowed = is_loopback(self.host) and any(one in path.parents for one in directories)
        if ".." in path.parts or not is_allowed or len(os.fsencode(endpoint.path)) > LONGEST_SOCKET_PATH:
            raise BadHeartbeat(
                f"{_shown(f'ipc://{endpoint.path}')} is not in a directory that a coordinator made for this replica; "
                "give the replica a tcp:// endpoint, or --allowed-event-sources ipc:///DIRECTORY on this machine"
            )
        return f"ipc://{endpoint.path}"


@dataclass(frozen=True)
class Identity:
    """Identity of a group of replicas that can answer for each other.

    Attributes:
        model: Name that the model is served under.
        configuration: Hash of the model configuration.
        tokenizer: Hash of the tokenizer and its chat template.
        aliases: Other names that the model is served under.
    """

    model: str
    configuration: str
    tokenizer: str
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(map(repr, (self.model, *self.aliases)))
        return f"{names} (configuration {self.configuration}, tokenizer {self.tokenizer})"


@dataclass(frozen=True)
class Heartbeat:
    """Answer of `GET /replica`.

    Attributes:
        instance: Identifier of the process; changes with a restart.
        identity: Model that the replica serves.
        weights: Hash of the model's weights.
        weights_version: Number of the weights; None if the replica does not say.
        is_updating: Whether new weights are being read or written.
        status: `OK`, `ASLEEP`, `PAUSED` or `FAILING`.
        has_keys: Whether the replica needs API keys, and binds salts to them.
        block_size: Tokens of a block.
        blocks: Blocks of the KV pool of each data-parallel rank.
        has_states: Whether the replica resumes at snapshots only.
        capacity: Maximum number of requests, waiting ones included.
        living: Current number of requests.
        other_requests: Current number of requests that other coordinators and clients have sent.
        other_prompt_tokens: Prompt tokens of these requests that are yet to be computed.
        other_output_tokens: Maximum tokens that these requests generate.
        steps: Steps that the engine has computed; grows unless the engine is stuck.
        skipped: Prompt tokens skipped through the cache since the start; None if hidden.
        computed: Prompt tokens computed since the start; None if hidden.
        events: Event sources, one for each data-parallel rank of the replica's world; empty without events.
        events_problem: Reason why the event sources that the replica names are left out; empty if they are not.
        root: Directory of the model's tokenizer, which load generators send as its name; empty if it has none.
    """

    instance: str
    identity: Identity
    weights: str
    status: str
    has_keys: bool
    block_size: int
    blocks: int
    has_states: bool
    capacity: int
    living: int
    other_requests: int
    other_prompt_tokens: int
    other_output_tokens: int
    steps: int
    skipped: int | None
    computed: int | None
    events: tuple[EventSource, ...]
    events_problem: str = ""
    root: str = ""
    weights_version: int | None = None
    is_updating: bool = False

    @property
    def model(self) -> str:
        """Name that the model is served under, which is that of the group."""
        return self.identity.model

    @property
    def has_known_states(self) -> bool:
        """True if the replica resumes at snapshots only, and its events (or its answers, without events) tell where.

        Otherwise routers take a cached run's whole length as skipped: with recurrent layers runs end at snapshots.
        """
        return self.has_states and all(one.states is not None for one in self.events)

    @classmethod
    def of(cls, content: object, places: EventPlaces) -> Heartbeat:
        """Validate an answer.

        Args:
            content: Parsed JSON; None if the answer is not JSON.
            places: Places where the replica may publish KV events.

        Raises:
            BadHeartbeat: The content is not the answer of a replica.
        """
        try:
            fields = _Fields.of(content, "the answer")
            tokens = fields.optional("prompt_tokens")
            others = _Fields.of(fields.content.get("others"), "others")
            events, problem = _events(fields, places)
            return cls(
                instance=fields.text("instance"),
                identity=Identity(
                    fields.text("model"),
                    fields.text("configuration"),
                    fields.text("tokenizer"),
                    fields.texts("aliases"),
                ),
                weights=fields.text("weights"),
                status=fields.choice("status", (OK, ASLEEP, PAUSED, FAILING)),
                has_keys=fields.flag("has_keys"),
                block_size=fields.number("block_size", 1, MAX_BLOCK_SIZE),
                blocks=fields.number("blocks", 1, MAX_BLOCKS // max(1, len(events))),
                has_states=fields.flag("has_states"),
                capacity=fields.number("capacity", 1),
                living=fields.number("living"),
                other_requests=others.number("requests", maximum=MAX_REQUESTS),
                other_prompt_tokens=others.number("prompt_tokens"),
                other_output_tokens=others.number("output_tokens"),
                steps=fields.number("steps"),
                skipped=None if tokens is None else tokens.number("skipped"),
                computed=None if tokens is None else tokens.number("computed"),
                events=events,
                events_problem=problem,
                root=fields.text("root", minimum=0) if fields.has("root") else "",
                weights_version=fields.number("weights_version") if fields.has("weights_version") else None,
                is_updating=fields.has("is_updating") and fields.flag("is_updating"),
            )
        except BadHeartbeat as error:
            raise BadHeartbeat(f"GET {PATH} does not return a replica's answer: {error}") from None


def _events(fields: _Fields, places: EventPlaces) -> tuple[tuple[EventSource, ...], str]:
    """Return the event sources, or none of them and the problem of the first wrong one."""
    named = fields.items("kv_events", MAX_EVENT_SOURCES)
    try:
        return tuple(_source(_Fields.of(one, "kv_events"), places) for one in named), ""
    except BadHeartbeat as error:
        return (), str(error)


def _source(fields: _Fields, places: EventPlaces) -> EventSource:
    def address(name: str) -> str | None:
        return None if fields.content.get(name) is None else places.address(fields.content[name])

    return EventSource(
        endpoint=places.address(fields.content.get("endpoint")),
        replay=address("replay"),
        topic=fields.text("topic", minimum=0),
        states=address("states"),
        states_replay=address("states_replay"),
    )


@dataclass(frozen=True)
class _Fields:
    """Fields of a JSON object from a replica. Each method raises `BadHeartbeat` for another type or value."""

    content: Mapping[str, object]

    @classmethod
    def of(cls, content: object, name: str) -> _Fields:
        if not isinstance(content, dict):
            raise BadHeartbeat(f"{name} is {_shown(content)}, and must be an object")
        return cls(content)

    def optional(self, name: str) -> _Fields | None:
        found = self.content.get(name)
        return None if found is None else _Fields.of(found, name)

    def has(self, name: str) -> bool:
        """Return whether a field is given; replicas of earlier versions lack some."""
        return self.content.get(name) is not None

    def items(self, name: str, maximum: int) -> list[object]:
        found = self.content.get(name)
        if found is not None and (not isinstance(found, list) or len(found) > maximum):
            raise BadHeartbeat(f"{name} must be a list of at most {maximum}")
        return found or []

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts; a replica of an earlier version has none."""
        return tuple(_Fields({name: one}).text(name) for one in self.items(name, MAX_NAMES))

    def text(self, name: str, minimum: int = 1) -> str:
        found = self.content.get(name)
        if not isinstance(found, str) or not minimum <= len(found) <= MAX_NAME:
            raise BadHeartbeat(f"{name} is {_shown(found)}, and must be a text of {minimum} to {MAX_NAME} characters")
        return found

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        found = self.content.get(name)
        if not isinstance(found, str) or found not in choices:
            raise BadHeartbeat(f"{name} is {_shown(found)}, and must be one of {', '.join(choices)}")
        return found

    def flag(self, name: str) -> bool:
        found = self.content.get(name)
        if not isinstance(found, bool):
            raise BadHeartbeat(f"{name} is {_shown(found)}, and must be true or false")
        return found

    def number(self, name: str, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
        found = self.content.get(name)
        if type(found) is not int or not minimum <= found <= maximum:
            raise BadHeartbeat(f"{name} is {_shown(found)}, and must be a whole number of {minimum} to {maximum}")
        return found


def _shown(value: object) -> str:
    """Return a wrong value for a message; containers, which may be long, as their type."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
