"""Settings of a server: address, access (keys, hosts, origins, admin routes) and limits on one client's resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.hosts import ANY_HOST, parse_host, parse_origin
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.options import flag_of, require

KB, MB = 2**10, 2**20


@dataclass(frozen=True)
class ServerLimits:
    """Limits on request bodies and connections. Times are in seconds."""

    max_body_mb: float = 8.0  # of 2**20 bytes
    max_connections: int = 1024
    header_timeout: float = 10.0  # from the connection, or a request's first byte, to the end of its headers
    body_timeout: float = 60.0  # for all of the body
    idle_timeout: float = 75.0  # between two requests, and for a client that does not read its response
    max_schema_kb: float = 64.0  # of 2**10 bytes: a JSON schema, or a regular expression
    grammar_timeout: float = 5.0  # to compile a schema or a regular expression
    responses_store_mb: float = 0.0  # of 2**20 bytes; 0: no responses are stored
    answers_memory_mb: float = 64.0  # of 2**20 bytes; 0: token ids of answers are not remembered

    def __post_init__(self) -> None:
        size, connections = self.max_body_mb, self.max_connections
        require(math.isfinite(size) and size > 0, f"--max-body-mb {size} must be more than zero")
        require(connections >= 1, f"--max-connections {connections} must be at least 1")
        schema = self.max_schema_kb
        require(math.isfinite(schema) and schema > 0, f"--max-schema-kb {schema} must be more than zero")
        for name, nothing in (("responses_store_mb", "no store"), ("answers_memory_mb", "no memory")):
            memory = getattr(self, name)
            valid = math.isfinite(memory) and memory >= 0
            require(valid, f"{flag_of(name)} {memory} must be zero ({nothing}) or more")
        for name in ("header_timeout", "body_timeout", "idle_timeout", "grammar_timeout"):
            seconds = getattr(self, name)
            valid = math.isfinite(seconds) and seconds > 0
            require(valid, f"{flag_of(name)} {seconds} must be more than zero seconds")

    @property
    def schema_bytes(self) -> int:
        """Maximum bytes of a schema or a regular expression."""
        return int(self.max_schema_kb * KB)

    @property
    def store_bytes(self) -> int:
        """Maximum bytes of stored responses."""
        return int(self.responses_store_mb * MB)

    @property
    def answers_bytes(self) -> int:
        """Maximum bytes of remembered answers."""
        return int(self.answers_memory_mb * MB)

    @property
    def body_bytes(self) -> int:
        """Maximum bytes of a body."""
        return int(self.max_body_mb * MB)


LOG_LEVELS = ("debug", "info", "warning", "error")
CONTROL_TOKENS = ("text", "parse")
TOOL_CALL_PARSERS = tuple("auto granite hermes lfm2 llama3_json mistral nemotron pythonic qwen3_coder".split())
REASONING_PARSERS = ("auto", "none", "mistral", "seed", "think")

MEGATRONS_PARSERS = {
    "deepseek-r1-reasoning": ("reasoning_parser", "think"),
    "qwen3-coder-tool": ("tool_call_parser", "qwen3_coder"),
}
"""Megatron's names of parsers: field of `ServerConfig`, and its value."""


def from_megatrons_parsers(names: Sequence[str]) -> FieldValues:
    """Return the fields of `ServerConfig` that Megatron's names of parsers mean.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in names:
        known = ", ".join(MEGATRONS_PARSERS)
        require(
            name in MEGATRONS_PARSERS,
            f"parsers {name} must be one of {known}; or leave it out, since the chat template names the format",
        )
    return dict(MEGATRONS_PARSERS[name] for name in names)


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `megatron-ext serve`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: tuple[str, ...] = ()  # the first is shown; default: the last part of the checkpoint's path
    max_waiting_requests: int = 256
    shutdown_timeout: float = 30.0  # seconds
    inference_logging_step_interval: int | None = None  # steps; 0 is no log; default: every ten seconds of work
    log_level: str = "info"  # one of LOG_LEVELS
    access_log: bool = True  # a line for each request
    dry_run: bool = False  # print what the engine would take, and load nothing
    profile: str | None = None  # a directory for a trace of the first steps
    limits: ServerLimits = field(default_factory=ServerLimits)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    api_key: str | None = None  # default: the variable MEGATRON_EXT_API_KEY or the file; without any, no key is needed
    api_key_file: str | None = None
    admin_key_file: str | None = None
    allowed_hosts: tuple[str, ...] = ()  # default: the loopback names without keys, any host with keys
    hide_cache_counts: bool = False
    chat_control_tokens: str = "text"  # one of CONTROL_TOKENS
    tool_call_parser: str = "auto"  # one of TOOL_CALL_PARSERS
    reasoning_parser: str = "auto"  # one of REASONING_PARSERS
    strict_fields: bool = False  # refuse unknown fields of bodies
    cors_allowed_origins: tuple[str, ...] = ()  # origins of web pages; default: none
    enable_admin_routes: bool = False
    weights_root: str | None = None  # directory of new weights; default: weights cannot be replaced

    def __post_init__(self) -> None:
        self._check_access()
        level, levels = self.log_level, ", ".join(LOG_LEVELS)
        require(level in LOG_LEVELS, f"--log-level {level!r} is unknown; one of {levels}")
        require(bool(self.host), "--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every network")
        require(0 <= self.port <= 65535, f"--port {self.port} must be between 0 (any free one) and 65535")
        names = self.served_model_name
        require(not isinstance(names, str), f"--served-model-name {names!r} is one text; give a list of them")
        require(all(names), "--served-model-name has an empty name; leave it out for the checkpoint's name")
        require(len(set(names)) == len(names), f"--served-model-name has a name twice: {' '.join(names)}")
        waiting, timeout = self.max_waiting_requests, self.shutdown_timeout
        require(waiting >= 0, f"--max-waiting-requests {waiting} must be zero or more")
        valid_timeout = math.isfinite(timeout) and timeout >= 0
        require(valid_timeout, f"--shutdown-timeout {timeout} must be zero (cancel at once) or more seconds")
        interval = self.inference_logging_step_interval
        valid_interval = interval is None or interval >= 0
        require(valid_interval, f"--inference-logging-step-interval {interval} must be zero (no log) or more")

    def _check_access(self) -> None:
        if self.api_key is not None:
            problem = key_problem(self.api_key)
            require(problem is None, f"--api-key {problem}; leave it out to admit all clients")
        require(
            self.api_key is None or self.api_key_file is None,
            "--api-key and --api-key-file contradict each other; give one of them",
        )
        for host in self.allowed_hosts:
            require(
                host == ANY_HOST or parse_host(host) is not None,
                f"--allowed-hosts {host!r} is not a host name; give names and addresses such as models.example, "
                f"models.example:8443, 10.0.0.5 or [::1], or {ANY_HOST} for any",
            )
        for origin in self.cors_allowed_origins:
            require(
                origin == ANY_HOST or parse_origin(origin) is not None,
                f"--cors-allowed-origins {origin!r} is not an origin; give origins of web pages, such as "
                f"https://app.example or http://localhost:3000, or {ANY_HOST} for any",
            )
        require(
            self.weights_root is None or self.enable_admin_routes,
            f"--weights-root {self.weights_root} needs --enable-admin-routes; give both or neither",
        )
        require(
            self.chat_control_tokens in CONTROL_TOKENS,
            f"--chat-control-tokens {self.chat_control_tokens!r} must be one of {', '.join(CONTROL_TOKENS)}",
        )
        for flag, value, known in (
            ("--tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS),
            ("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            require(value in known, f"{flag} {value!r} must be one of {', '.join(known)}")


def key_problem(key: str) -> str | None:
    """Return why a text cannot be a key, without the text itself; None if it can.

    Headers are bytes: characters outside ASCII would depend on the client's encoding.
    """
    if key.isascii() and key.isprintable() and key.strip() == key != "":
        return None
    return "must be printable ASCII without spaces around it"
