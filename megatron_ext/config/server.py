"""Settings of a server: address, access (keys, hosts, origins, admin routes) and limits on one client's resources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.hosts import ANY_HOST, parse_host, parse_origin
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.options import option, require, require_options

KB, MB = 2**10, 2**20


@dataclass(frozen=True)
class ServerLimits:
    """Limits on request bodies and connections. Times are in seconds."""

    max_body_mb: float = option(
        8.0, "Maximum size of a request body in MB of 2**20 bytes; larger ones get a 413", above=0
    )
    max_connections: int = option(1024, "Maximum number of connections; lowered to fit `ulimit -n`", minimum=1)
    header_timeout: float = option(
        10.0, "Timeout in seconds for a request's headers", above=0
    )  # from the connection, or a request's first byte, to the end of its headers
    body_timeout: float = option(60.0, "Timeout in seconds for a request's body", above=0)
    idle_timeout: float = option(
        75.0, "Timeout in seconds of a connection between requests, and of a client that does not read", above=0
    )
    max_schema_kb: float = option(
        64.0, "Maximum size of a response_format's JSON schema or regular expression, in KB of 2**10 bytes", above=0
    )
    grammar_timeout: float = option(
        5.0, "Timeout in seconds for compiling a response_format; longer ones get a 400", above=0
    )
    responses_store_mb: float = option(
        0.0,
        "Memory for responses that clients continue by id, in MB of 2**20 bytes; 0: none are stored",
        minimum=0,
        bounds="zero (no store) or more",
    )
    answers_memory_mb: float = option(
        64.0,
        "Memory for the token ids of answers, with which the next turn of a chat begins, in MB of 2**20 bytes; "
        "0: each turn is tokenized anew",
        minimum=0,
        bounds="zero (no memory) or more",
    )

    def __post_init__(self) -> None:
        require_options(self)

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
    """Return the fields of `ServerConfig` that Megatron's names of parsers mean."""
    for name in names:
        known = ", ".join(MEGATRONS_PARSERS)
        require(
            name in MEGATRONS_PARSERS,
            f"parsers {name} must be one of {known}; or leave it out, since the chat template names the format",
        )
    return dict(MEGATRONS_PARSERS[name] for name in names)


@dataclass(frozen=True)
class AccessConfig:
    """Access to a server: keys, hosts, origins, admin routes, and what clients' texts may mean."""

    api_key: str | None = option(
        None,
        "Key that clients must send as Authorization: Bearer KEY; visible in the list of processes. "
        "Default: the variable MEGATRON_EXT_API_KEY, else no key is required",
    )
    api_key_file: str | None = option(
        None, "File with one key per line; the clients of each key have a separate cache", metavar="FILE"
    )
    admin_key_file: str | None = option(
        None,
        "File with the only key for /prefix_cache and /reset_prefix_cache; default: a single API key",
        metavar="FILE",
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Accepted Host names, * for any; default: the loopback names, with API keys any", metavar="HOST"
    )
    hide_cache_counts: bool = option(
        False, "Hide how much of a prompt was cached; counts and metrics need the admin key"
    )
    chat_control_tokens: str = option(
        "text",
        "Treatment of special tokens spelled in messages of system, user or tool: text, or the tokens (parse)",
        choices=CONTROL_TOKENS,
    )
    tool_call_parser: str = option(
        "auto", "Format of the model's tool calls: auto finds it in the chat template", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str = option(
        "auto",
        "Markers around the model's thinking: auto finds them in the chat template, none leaves it in the content",
        choices=REASONING_PARSERS,
    )
    cors_allowed_origins: tuple[str, ...] = option(
        (), "Origins whose web pages may send requests, * for any; default: none", metavar="ORIGIN"
    )
    enable_admin_routes: bool = option(
        False, "Enable the routes that sleep, wake up, abort requests and update weights; needs an admin key"
    )
    weights_root: str | None = option(
        None, "With --enable-admin-routes: directory that new weights must lie below", metavar="DIR"
    )

    def __post_init__(self) -> None:
        require_options(self)
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


@dataclass(frozen=True)
class ServerConfig(AccessConfig):
    """Settings of `megatron-ext serve`."""

    host: str = option("127.0.0.1", "Address to listen on")
    port: int = option(
        8000,
        "Port to listen on; 0: any free port",
        minimum=0,
        maximum=65535,
        bounds="between 0 (any free one) and 65535",
    )
    served_model_name: tuple[str, ...] = option(
        (), "Names of the model for clients, of which the first is shown; default: the checkpoint's", metavar="NAME"
    )
    max_waiting_requests: int = option(256, "Maximum number of waiting requests; further ones get a 429", minimum=0)
    shutdown_timeout: float = option(
        30.0,
        "Seconds after a stop signal before running requests are cancelled",
        minimum=0,
        bounds="zero (cancel at once) or more seconds",
    )
    inference_logging_step_interval: int | None = option(
        None,
        "Number of steps between two log lines of load and throughput; 0: none; default: ten seconds of work",
        minimum=0,
        bounds="zero (no log) or more",
    )
    log_level: str = option("info", "Lowest level of the lines that are logged", choices=LOG_LEVELS)
    access_log: bool = option(True, "Log a line for each request when it ends: counts and times, never texts")
    dry_run: bool = option(
        False, "Print bytes of weights, blocks and snapshots, and how many requests fit; load nothing"
    )
    profile: str | None = option(
        None, "Directory for a trace of the first 100 steps with named phases; ui.perfetto.dev shows it", metavar="DIR"
    )
    limits: ServerLimits = field(default_factory=ServerLimits)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    strict_fields: bool = option(
        False, "Refuse unknown fields of bodies; default: they are ignored, and named in the log once"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.host), "--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every network")
        names = self.served_model_name
        require(not isinstance(names, str), f"--served-model-name {names!r} is one text; give a list of them")
        require(all(names), "--served-model-name has an empty name; leave it out for the checkpoint's name")
        require(len(set(names)) == len(names), f"--served-model-name has a name twice: {' '.join(names)}")


def key_problem(key: str) -> str | None:
    """Return why a text cannot be a key, without the text itself; None if it can.

    Headers are bytes: characters outside ASCII would depend on the client's encoding.
    """
    if key.isascii() and key.isprintable() and key.strip() == key != "":
        return None
    return "must be printable ASCII without spaces around it"
