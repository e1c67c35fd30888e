"""Flags of the server: address, limits, and access."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config import CONTROL_TOKENS, LOG_LEVELS, ServerConfig, ServerLimits
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS

SERVER = FlagGroup(
    "server",
    ServerConfig,
    (
        Flag("host", "Address to listen on"),
        Flag("port", "Port to listen on; 0: any free port"),
        Flag(
            "served_model_name",
            "Names of the model for clients, of which the first is shown; default: the checkpoint's",
            metavar="NAME",
        ),
        Flag("max_waiting_requests", "Maximum number of waiting requests; further ones get a 429"),
        Flag("shutdown_timeout", "Seconds after a stop signal before running requests are cancelled"),
        Flag(
            "inference_logging_step_interval",
            "Number of steps between two log lines of load and throughput; 0: none; default: ten seconds of work",
        ),
        Flag("log_level", "Lowest level of the lines that are logged", choices=LOG_LEVELS),
        Flag("access_log", "Log a line for each request when it ends: counts and times, never texts"),
        Flag("strict_fields", "Refuse unknown fields of bodies; default: they are ignored, and named in the log once"),
        Flag("dry_run", "Print bytes of weights, blocks and snapshots, and how many requests fit; load nothing"),
        Flag(
            "profile",
            "Directory for a trace of the first 100 steps with named phases; ui.perfetto.dev shows it",
            metavar="DIR",
        ),
    ),
)

LIMITS = FlagGroup(
    "server limits",
    ServerLimits,
    (
        Flag("max_body_mb", "Maximum size of a request body in MB of 2**20 bytes; larger ones get a 413"),
        Flag("max_connections", "Maximum number of connections; lowered to fit `ulimit -n`"),
        Flag("header_timeout", "Timeout in seconds for a request's headers"),
        Flag("body_timeout", "Timeout in seconds for a request's body"),
        Flag("idle_timeout", "Timeout in seconds of a connection between requests, and of a client that does not read"),
        Flag(
            "max_schema_kb",
            "Maximum size of a response_format's JSON schema or regular expression, in KB of 2**10 bytes",
        ),
        Flag("grammar_timeout", "Timeout in seconds for compiling a response_format; longer ones get a 400"),
        Flag(
            "responses_store_mb",
            "Memory for responses that clients continue by id, in MB of 2**20 bytes; 0: none are stored",
        ),
        Flag(
            "answers_memory_mb",
            "Memory for the token ids of answers, with which the next turn of a chat begins, in MB of 2**20 bytes; "
            "0: each turn is tokenized anew",
        ),
    ),
)

KV_EVENTS = FlagGroup(
    "KV events (for routers; see docs/routing.md)",
    KvEventsConfig,
    (
        Flag(
            "kv_events_endpoint",
            "Publish changes of the cache, token ids included, as vLLM's events over ZeroMQ, e.g. to "
            "tcp://127.0.0.1:5557. The server binds a loopback address or *, and connects to any other host; "
            "ipc:///PATH is a socket file, readable only with access to its directory. Default: no events",
            metavar="tcp://HOST:PORT",
        ),
        Flag("kv_events_topic", "Topic of the events"),
        Flag(
            "kv_events_replay_endpoint",
            "Address at which subscribers request lost events; default: no replay",
            metavar="tcp://HOST:PORT",
        ),
        Flag(
            "kv_events_states_endpoint",
            "Publish the positions at which a model with recurrent layers can resume, in events of this package; "
            "default: no such events",
            metavar="tcp://HOST:PORT",
        ),
        Flag(
            "kv_events_states_replay_endpoint",
            "Address at which subscribers request lost events of states; default: no replay",
            metavar="tcp://HOST:PORT",
        ),
        Flag(
            "kv_events_buffer_steps",
            "Messages that each socket keeps for replay; after a longer gap subscribers get the whole contents",
        ),
    ),
)

ACCESS = FlagGroup(
    "access (see docs/operating.md and SECURITY.md)",
    ServerConfig,
    (
        Flag(
            "api_key",
            "Key that clients must send as Authorization: Bearer KEY; visible in the list of processes. "
            "Default: the variable MEGATRON_EXT_API_KEY, else no key is required",
        ),
        Flag(
            "api_key_file", "File with one key per line; the clients of each key have a separate cache", metavar="FILE"
        ),
        Flag(
            "admin_key_file",
            "File with the only key for /prefix_cache and /reset_prefix_cache; default: a single API key",
            metavar="FILE",
        ),
        Flag(
            "allowed_hosts",
            "Accepted Host names, * for any; default: the loopback names, with API keys any",
            metavar="HOST",
        ),
        Flag(
            "hide_cache_counts",
            "Hide how much of a prompt was cached; counts and metrics need the admin key",
        ),
        Flag(
            "chat_control_tokens",
            "Treatment of special tokens spelled in messages of system, user or tool: text, or the tokens (parse)",
            choices=CONTROL_TOKENS,
        ),
        Flag(
            "tool_call_parser",
            "Format of the model's tool calls: auto finds it in the chat template",
            choices=TOOL_CALL_PARSERS,
        ),
        Flag(
            "reasoning_parser",
            "Markers around the model's thinking: auto finds them in the chat template, none leaves it in the content",
            choices=REASONING_PARSERS,
        ),
        Flag(
            "cors_allowed_origins",
            "Origins whose web pages may send requests, * for any; default: none",
            metavar="ORIGIN",
        ),
        Flag(
            "enable_admin_routes",
            "Enable the routes that sleep, wake up, abort requests and update weights; needs an admin key",
        ),
        Flag(
            "weights_root",
            "With --enable-admin-routes: directory that new weights must lie below",
            metavar="DIR",
        ),
    ),
)
