"""KV event settings: endpoints of changes of the prefix cache, and bounds of messages, memory and receivers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.config.hosts import is_loopback, is_port, parse_host
from megatron_ext.config.options import flag_of, option, require, require_options
from megatron_ext.errors import ConfigError

# Sent
BATCH_BYTES = 2**18  # of a message with several events
EVENT_BLOCKS = 64  # of a `BlockStored` event, since encoding one blocks other threads
EVENT_TOKENS = 2**15  # of a `BlockStored` event of several blocks
EVENT_HASHES = 2**10  # of any other event
MAX_BLOCK_TOKENS = 2**16  # of a block; such a block has at most 330 KB as an event
MAX_TOPIC_BYTES = 512

# Kept for replays, for each socket
MAX_BUFFER_STEPS = 2**20  # messages
BUFFER_BYTES = 2**28

# Accepted
MAX_REQUEST_BYTES = 2**10  # of a frame: subscriptions, replay requests, handshakes


LONGEST_SOCKET_PATH = 107  # bytes, on Linux: a socket's address has 108 with the final zero
LONGEST_IPC_PATH = LONGEST_SOCKET_PATH - 5  # leaves room for the rank of a replica, as in .1023
_EXAMPLES = "tcp://HOST:PORT, as in tcp://127.0.0.1:5557, or ipc:///PATH of a socket in a directory of yours"
_ALL_NETWORKS = ("*", "0.0.0.0", "[::]")


@dataclass(frozen=True)
class TcpEndpoint:
    """ZeroMQ TCP address such as `tcp://127.0.0.1:5557`.

    Attributes:
        host: Name, address (IPv6 in brackets), or `*` for every network.
        port: Port number; 0 is any free port.
    """

    host: str
    port: int

    @property
    def is_bound(self) -> bool:
        """True if the socket binds to the address; it connects to any address that is not this machine's."""
        return self.host in _ALL_NETWORKS or self.is_loopback

    @property
    def is_loopback(self) -> bool:
        """True for a loopback address, so that events stay on this machine."""
        return is_loopback(self.host.strip("[]"))

    def of_replica(self, rank: int) -> str:
        """Return the address of a replica of this world: the port plus `rank`, or any free port."""
        return f"tcp://{self.host}:{self.port + rank if self.port else '*'}"


@dataclass(frozen=True)
class IpcEndpoint:
    """Socket file at an absolute path: `ipc:///run/user/1000/events`; its directory's permissions control access."""

    path: str

    @property
    def is_bound(self) -> bool:
        """Always true: the socket binds to the file."""
        return True

    def of_replica(self, rank: int) -> str:
        """Return the address of a replica of this world: the path itself for rank 0, else with the rank appended."""
        return f"ipc://{self.path}.{rank}" if rank else f"ipc://{self.path}"


Endpoint: TypeAlias = TcpEndpoint | IpcEndpoint


def parse_endpoint(text: str) -> Endpoint | None:
    """Parse a ZeroMQ address; return None if events cannot be published there."""
    scheme, mark, rest = text.partition("://")
    if mark and scheme == "ipc":
        is_file = rest.startswith("/") and not rest.endswith("/") and rest.isprintable()
        return IpcEndpoint(rest) if is_file else None
    if not mark or scheme != "tcp":
        return None
    host, _, port = rest.rpartition(":")
    if host == "*":
        return TcpEndpoint(host, int(port)) if is_port(port) else None
    name = parse_host(rest)
    if name is None or name.port is None or not host:
        return None
    return TcpEndpoint(f"[{name.name}]" if ":" in name.name else name.name, name.port)


@dataclass(frozen=True)
class KvEventsConfig:
    """Settings of KV events (RP-1), in vLLM's format; off without an endpoint.

    Blocks and snapshots of recurrent layers (states) are published on sockets of their own, since clients with vLLM's
    message classes cannot decode events of states.
    """

    kv_events_endpoint: str | None = option(
        None,
        "Publish changes of the cache, token ids included, as vLLM's events over ZeroMQ, e.g. to "
        "tcp://127.0.0.1:5557. The server binds a loopback address or *, and connects to any other host; "
        "ipc:///PATH is a socket file, readable only with access to its directory. Default: no events",
        metavar="tcp://HOST:PORT",
    )
    kv_events_topic: str = option("kv-events", "Topic of the events")
    kv_events_replay_endpoint: str | None = option(
        None, "Address at which subscribers request lost events; default: no replay", metavar="tcp://HOST:PORT"
    )
    kv_events_buffer_steps: int = option(
        10_000,
        "Messages that each socket keeps for replay; after a longer gap subscribers get the whole contents",
        minimum=1,
        maximum=MAX_BUFFER_STEPS,
    )
    kv_events_states_endpoint: str | None = option(
        None,
        "Publish the positions at which a model with recurrent layers can resume, in events of this package; "
        "default: no such events",
        metavar="tcp://HOST:PORT",
    )
    kv_events_states_replay_endpoint: str | None = option(
        None,
        "Address at which subscribers request lost events of states; default: no replay",
        metavar="tcp://HOST:PORT",
    )

    def __post_init__(self) -> None:
        require_options(self)
        endpoints = self.endpoints()
        for name, needed in _NEEDED.items():
            given = getattr(self, name)
            satisfied = given is None or getattr(self, needed) is not None
            require(satisfied, f"{flag_of(name)} {given} needs {flag_of(needed)}; give both")
        states, replays = self.kv_events_states_endpoint, [flag for flag in endpoints if "replay" in flag]
        require(
            states is None or len(replays) != 1,
            f"--kv-events-states-endpoint {states}: blocks and states are either both replayed or neither is; give "
            "both --kv-events-replay-endpoint and --kv-events-states-replay-endpoint, or none of them",
        )
        for flag in replays:
            address = endpoints[flag]
            require(
                address.is_bound,
                f"{flag} {address.of_replica(0)} must be this machine's: a loopback address, * or ipc://",
            )
        length = len(os.fsencode(self.kv_events_topic))
        require(
            length <= MAX_TOPIC_BYTES, f"--kv-events-topic has {length} bytes and must have at most {MAX_TOPIC_BYTES}"
        )

    def endpoints(self) -> dict[str, Endpoint]:
        """Return the endpoints that are given, by flag.

        Raises:
            ConfigError: Events cannot be published at one of them.
        """
        texts = {name: getattr(self, name) for name in ("kv_events_endpoint", *_NEEDED)}
        return {flag_of(name): _parsed(flag_of(name), text) for name, text in texts.items() if text is not None}


# Endpoints that need another one.
_NEEDED = {
    "kv_events_replay_endpoint": "kv_events_endpoint",
    "kv_events_states_endpoint": "kv_events_endpoint",
    "kv_events_states_replay_endpoint": "kv_events_states_endpoint",
}


def _parsed(flag: str, text: str) -> Endpoint:
    """Return the address in the value of a flag, whose path must not be too long."""
    parsed = parse_endpoint(text)
    if parsed is None:
        raise ConfigError(f"{flag} {text!r} must be {_EXAMPLES}")
    length = len(os.fsencode(parsed.path)) if isinstance(parsed, IpcEndpoint) else 0
    require(
        length <= LONGEST_IPC_PATH,
        f"{flag} {text!r}: the path has {length} bytes and must have at most {LONGEST_IPC_PATH}",
    )
    return parsed
