"""Coordinator settings: address, replicas, and routing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.config.access_control import AccessConfig
from megatron_ext.config.checks import require
from megatron_ext.config.hosts import ANY_HOST, parse_host, parse_origin
from megatron_ext.config.limits import ServerLimits
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.config.run import LOG_LEVELS

MAX_LAUNCHED = 1024  # replicas on one machine; a larger number is a mistake
LONGEST_WAIT = 24 * 3600.0  # seconds


@dataclass(frozen=True)
class CoordinatorConfig(AccessConfig):
    """Settings of `megatron-ext coordinate`. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    replica: tuple[str, ...] = ()  # URLs of running servers
    replicas_file: str | None = None  # file with more URLs, one a line; read again when it changes
    model: tuple[str, ...] = ()  # served names that replicas may have; default: that of the first replica
    launch: int = 0  # replicas to start on this machine
    replicas_end_with_coordinator: bool = False  # also when it is killed; else the next one finds them
    replica_timeout: float = 30.0  # without a response, until a replica counts as dead
    # Where replicas may publish KV events besides their own hosts: hosts, `*` for any, `ipc:///DIRECTORY`.
    allowed_event_sources: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    log_level: str = "info"  # one of LOG_LEVELS
    access_log: bool = True
    limits: ServerLimits = field(default_factory=ServerLimits)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.host), "--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every network")
        require(0 <= self.port <= 65535, f"--port {self.port} must be between 0 (any free one) and 65535")
        require(self.log_level in LOG_LEVELS, f"--log-level {self.log_level!r}: one of {', '.join(LOG_LEVELS)}")
        require(0 <= self.launch <= MAX_LAUNCHED, f"--launch {self.launch} must be between 0 and {MAX_LAUNCHED}")
        require(
            bool(self.replica or self.replicas_file or self.launch or self.enable_admin_routes),
            "there is no replica; give --replica URL, --replicas-file FILE or --launch N",
        )
        for url in self.replica:
            problem = replica_problem(url)
            require(problem is None, f"--replica {url!r} {problem}")
        require(len(set(self.replica)) == len(self.replica), "--replica has a URL twice; give each replica once")
        require(all(self.model), "--model is empty; give the name that replicas serve, or leave it out")
        for place in self.allowed_event_sources:
            require(
                is_event_place(place),
                f"--allowed-event-sources {place!r} is no place of KV events; give hosts such as events.example, "
                f"10.0.0.5 or [::1], {ANY_HOST} for any, or directories such as ipc:///run/events",
            )
        for name, seconds, bound in (
            ("--replica-timeout", self.replica_timeout, "more than zero"),
            ("--shutdown-timeout", self.shutdown_timeout, "zero or more"),
        ):
            fits = 0 <= seconds <= LONGEST_WAIT and (seconds > 0 or bound == "zero or more")
            require(fits, f"{name} {seconds} must be {bound} and at most {LONGEST_WAIT:g} seconds")


def is_event_place(text: str) -> bool:
    """Return whether a text can stand in `--allowed-event-sources`."""
    host = parse_host(text)
    return text == ANY_HOST or socket_directory(text) is not None or (host is not None and host.port is None)


def socket_directory(text: str) -> Path | None:
    """Return the directory that `ipc:///DIRECTORY` names; None if the text is anything else."""
    path = Path(text.removeprefix("ipc://"))
    return path if text.startswith("ipc:///") and path.parts[1:] and ".." not in path.parts else None


def replica_problem(url: str) -> str | None:
    """Return why a text cannot be the URL of a replica; None if it can."""
    if parse_origin(url) is None or not url.startswith("http://"):
        return (
            "is not the URL of a replica; give one such as http://10.0.0.5:8000, without a path (HTTPS is not "
            "supported)"
        )
    return None


@dataclass(frozen=True)
class CoordinatorSettings:
    """All settings of a coordinator from a command line.

    Attributes:
        coordinator: The coordinator's own settings.
        replica_flags: Flags of `megatron-ext serve` for each launched replica.
        replica_world: Ranks of each launched replica.
        has_private_events: Whether launched replicas publish KV events to the coordinator alone, not where their flags
            say.
        replica_drain_seconds: Seconds that each launched replica may take at its end to write its cache to disk.
    """

    coordinator: CoordinatorConfig
    replica_flags: tuple[str, ...] = ()
    replica_world: int = 1
    has_private_events: bool = False
    replica_drain_seconds: float = 0.0
