"""Where a server tells routers what it has cached."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.config.checks import require
from megatron_ext.config.hosts import is_loopback, parse_host

MAX_BUFFERED = 2**20
LONGEST_SOCKET_PATH = 107  # bytes, of Linux: a socket's address has 108 with the zero at its end
LONGEST_IPC_PATH = LONGEST_SOCKET_PATH - 5  # the rank of a replica is appended, as in .1023
_EXAMPLES = "tcp://HOST:PORT, as in tcp://127.0.0.1:5557, or ipc:///PATH of a socket in a directory of yours"
_ALL_NETWORKS = ("*", "0.0.0.0", "[::]")


@dataclass(frozen=True)
class TcpEndpoint:
    """An address of ZeroMQ's, as in `tcp://127.0.0.1:5557`.

    Attributes:
        host: A name, an address (of version 6 in brackets), or `*` for every network.
        port: 0 is any free one.
    """

    host: str
    port: int

    @property
    def is_bound(self) -> bool:
        """Whether to listen there; a socket connects to any other host, which only that host can listen on."""
        return self.host in _ALL_NETWORKS or self.is_loopback

    @property
    def is_loopback(self) -> bool:
        """Whether nothing leaves this machine."""
        return is_loopback(self.host.strip("[]"))

    def of_replica(self, rank: int) -> str:
        """The address of a replica of this world: its port is `rank` higher, unless it is any free one."""
        return f"tcp://{self.host}:{self.port + rank if self.port else '*'}"


@dataclass(frozen=True)
class IpcEndpoint:
    """A socket file, as in `ipc:///run/user/1000/events`: read by those that can enter its directory.

    Attributes:
        path: Absolute.
    """

    path: str

    @property
    def is_bound(self) -> bool:
        """Whether to listen there: always."""
        return True

    def of_replica(self, rank: int) -> str:
        """The address of a replica of this world: the first one's is the path itself."""
        return f"ipc://{self.path}.{rank}" if rank else f"ipc://{self.path}"


Endpoint: TypeAlias = TcpEndpoint | IpcEndpoint


def parse_endpoint(text: str) -> Endpoint | None:
    """Parse an address of ZeroMQ's; None if it is not one that events can be published at."""
    scheme, mark, rest = text.partition("://")
    if mark and scheme == "ipc":
        is_file = rest.startswith("/") and not rest.endswith("/") and rest.isprintable()
        return IpcEndpoint(rest) if is_file else None
    if not mark or scheme != "tcp":
        return None
    host, _, port = rest.rpartition(":")
    if host == "*":
        return TcpEndpoint(host, int(port)) if _is_port(port) else None
    name = parse_host(rest)
    if name is None or name.port is None or not host:
        return None
    return TcpEndpoint(f"[{name.name}]" if ":" in name.name else name.name, name.port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


@dataclass(frozen=True)
class KvEventsConfig:
    """KV events (RP-1), in vLLM's format; off unless there is an endpoint."""

    kv_events_endpoint: str | None = None  # tcp://HOST:PORT or ipc:///PATH
    kv_events_topic: str = "kv-events"
    kv_events_replay_endpoint: str | None = None  # default: nothing is replayed
    kv_events_buffer_steps: int = 10_000  # messages that can be replayed one by one

    def __post_init__(self) -> None:
        for flag, endpoint in (
            ("--kv-events-endpoint", self.kv_events_endpoint),
            ("--kv-events-replay-endpoint", self.kv_events_replay_endpoint),
        ):
            parsed = None if endpoint is None else parse_endpoint(endpoint)
            require(endpoint is None or parsed is not None, f"{flag} {endpoint!r} must be {_EXAMPLES}")
            length = len(os.fsencode(parsed.path)) if isinstance(parsed, IpcEndpoint) else 0
            require(
                length <= LONGEST_IPC_PATH,
                f"{flag} {endpoint!r}: the path has {length} bytes and may have {LONGEST_IPC_PATH}; give a shorter one",
            )
        require(
            self.kv_events_endpoint is not None or self.kv_events_replay_endpoint is None,
            f"--kv-events-replay-endpoint {self.kv_events_replay_endpoint} needs --kv-events-endpoint; give both",
        )
        replay = self.kv_events_replay_endpoint
        address = None if replay is None else parse_endpoint(replay)
        bound = address is None or address.is_bound
        require(bound, f"--kv-events-replay-endpoint {replay} must be this machine's: a loopback address, * or ipc://")
        steps = self.kv_events_buffer_steps
        valid_steps = 1 <= steps <= MAX_BUFFERED
        require(valid_steps, f"--kv-events-buffer-steps {steps} must be between 1 and {MAX_BUFFERED}")

    @property
    def endpoint(self) -> Endpoint | None:
        """Where events are published; None if they are not."""
        return None if self.kv_events_endpoint is None else parse_endpoint(self.kv_events_endpoint)

    @property
    def replay_endpoint(self) -> Endpoint | None:
        """Where they are asked for again."""
        return None if self.kv_events_replay_endpoint is None else parse_endpoint(self.kv_events_replay_endpoint)
