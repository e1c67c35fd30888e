"""Command line of `megatron-ext coordinate`: its own flags, and those of the replicas that it launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from arguments.flags import Flag, FlagGroup
from arguments.parser import CommandLine, fields_of, parse_server_arguments, unrecognized
from arguments.routing_group import ROUTING
from arguments.server_groups import ACCESS, LIMITS
from megatron_ext.config import LOG_LEVELS, ServerLimits
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.coordinator import CoordinatorConfig, CoordinatorSettings
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.errors import ConfigError

COORDINATOR = FlagGroup(
    "coordinator (see docs/fleet.md)",
    CoordinatorConfig,
    (
        Flag("host", "Address to listen on"),
        Flag("port", "Port to listen on; 0: any free port"),
        Flag(
            "replica",
            "Running server, as http://HOST:PORT; may be given several times",
            metavar="URL",
            is_repeated=True,
        ),
        Flag(
            "replicas_file", "File with the URLs of replicas, one per line; read again when it changes", metavar="FILE"
        ),
        Flag(
            "model",
            "Name of a model that replicas may serve; may be given several times. Default: that of the first replica",
            metavar="NAME",
            is_repeated=True,
        ),
        Flag(
            "launch",
            "Number of replicas to start on this machine, with the flags of megatron-ext serve that are also given",
        ),
        Flag(
            "replicas_end_with_coordinator",
            "End launched replicas when the coordinator is killed; otherwise the next one on this port finds them",
        ),
        Flag("replica_timeout", "Seconds without a heartbeat after which a replica counts as dead"),
        Flag(
            "allowed_event_sources",
            "Places besides a replica's own host where it may publish KV events: hosts, * for any, or directories of "
            "sockets on this machine as ipc:///DIRECTORY",
            metavar="HOST",
        ),
        Flag("shutdown_timeout", "Seconds after a stop signal before running requests are cancelled"),
        Flag("log_level", "Lowest level of the lines that are logged", choices=LOG_LEVELS),
        Flag("access_log", "Log a line for each request when it ends"),
    ),
)
# Flags of servers only.
_NOT_OURS = {
    *("chat_control_tokens", "weights_root", "max_schema_kb", "grammar_timeout", "responses_store_mb"),
    *("tool_call_parser", "reasoning_parser"),
}


def _ours(group: FlagGroup) -> FlagGroup:
    return dataclasses.replace(group, flags=tuple(flag for flag in group.flags if flag.field not in _NOT_OURS))


OUR_LIMITS, OUR_ACCESS = _ours(LIMITS), _ours(ACCESS)
GROUPS = (COORDINATOR, ROUTING, OUR_LIMITS, OUR_ACCESS)
# Flags of a coordinator that also apply to the replicas that it launches. The environment passes the API key.
_SHARED = ("api_key_file", "admin_key_file", "max_body_mb", "shutdown_timeout", "log_level")
_SHARED_SWITCHES = ("hide_cache_counts", "enable_admin_routes", "access_log")


def build_coordinator_parser(prog: str | None = None) -> CommandLine:
    """Return the parser of the coordinator's own flags. It raises `ConfigError` where argparse would exit."""
    parser = CommandLine(
        prog=prog,
        description="OpenAI server in front of replicas (megatron-ext serve) that sends each request to one with its "
        "prefix cached.",
        epilog="Other flags are those of megatron-ext serve, for the replicas of --launch. "
        "Exit codes: 0 stopped by a signal, 2 bad usage.",
        allow_abbrev=False,
    )
    for group in GROUPS:
        group.add_to(parser)
    parser.known = [flag.option for group in GROUPS for flag in group.flags]
    return parser


def parse_coordinator_arguments(argv: Sequence[str] | None = None, prog: str | None = None) -> CoordinatorSettings:
    """Parse an argument list; flags of the replicas are parsed as `megatron-ext serve` will.

    Raises:
        ConfigError: For any error that can be detected before a file is opened or a process started.
    """
    parser = build_coordinator_parser(prog)
    parsed, others = parser.parse_known_args(argv)
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(parsed).items()}
    config = CoordinatorConfig(
        limits=ServerLimits(**fields_of(OUR_LIMITS, values)),
        routing=RoutingConfig(**fields_of(ROUTING, values)),
        **fields_of(COORDINATOR, values),
        **fields_of(OUR_ACCESS, values),
    )
    if not config.launch:
        if others:
            raise ConfigError(
                unrecognized(others, parser.known, ()) + "; flags of megatron-ext serve need --launch, which starts it"
            )
        return CoordinatorSettings(config)
    flags = (*others, *_passed_on(values))
    try:
        replicas = parse_server_arguments(flags)
    except ConfigError as error:
        raise ConfigError(f"flags of the replicas: {error}") from None
    private_events = replicas.cache.enable_prefix_caching and replicas.server.kv_events.endpoint is None
    drain = replicas.cache.prefix_cache_drain_seconds if replicas.cache.is_durable else 0.0
    return CoordinatorSettings(config, flags, replicas.parallel.smallest_world, private_events, drain)


def _passed_on(values: FieldValues) -> list[str]:
    """Return the coordinator's flags that also apply to its replicas."""
    words: list[str] = []
    for group in GROUPS:
        for flag in group.flags:
            if flag.key not in values:
                continue
            if flag.field in _SHARED:
                words += [flag.option, str(values[flag.key])]
            elif flag.field in _SHARED_SWITCHES:
                words.append(flag.option if values[flag.key] else f"--no-{flag.key}")
    return words
