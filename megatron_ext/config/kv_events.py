"""KV event settings: the endpoints where a server publishes changes of its prefix cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from megatron_ext.config.checks import require
from megatron_ext.config.hosts import is_loopback, parse_host

MAX_BUFFERED = 2**20
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
    """Socket file such as `ipc:///run/user/1000/events`; the permissions of its directory control access.

    Attributes:
        path: Absolute path.
    """

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
        return TcpEndpoint(host, int(port)) if _is_port(port) else None
    name = parse_host(rest)
    if name is None or name.port is None or not host:
        return None
    return TcpEndpoint(f"[{name.name}]" if ":" in name.name else name.name, name.port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


@dataclass(frozen=True)
class KvEventsConfig:
    """Settings of KV events (RP-1), in vLLM's format; off without an endpoint."""

    kv_events_endpoint: str | None = None  # tcp://HOST:PORT or ipc:///PATH
    kv_events_topic: str = "kv-events"
    kv_events_replay_endpoint: str | None = None  # default: no replay
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
        """Endpoint where events are published; None if KV events are off."""
        return None if self.kv_events_endpoint is None else parse_endpoint(self.kv_events_endpoint)

    @property
    def replay_endpoint(self) -> Endpoint | None:
        """Endpoint for requests to replay events; None without replay."""
        return None if self.kv_events_replay_endpoint is None else parse_endpoint(self.kv_events_replay_endpoint)
