"""Flags of the server: address, limits, and access."""

from __future__ import annotations

from arguments.flags import Flag, FlagGroup
from megatron_ext.config import CONTROL_TOKENS, LOG_LEVELS, AccessConfig, ServerConfig, ServerLimits
from megatron_ext.config.kv_events import KvEventsConfig

SERVER = FlagGroup(
    "server",
    ServerConfig,
    (
        Flag("host", "Address to listen on"),
        Flag("port", "Port to listen on; 0 is any free one"),
        Flag("served_model_name", "Name of the model for clients; default: the checkpoint's", metavar="NAME"),
        Flag("max_waiting_requests", "Requests that wait beside those that run; beyond them clients get a 429"),
        Flag(
            "shutdown_timeout", "Seconds that running requests have after a signal to stop, before they are cancelled"
        ),
        Flag("inference_logging_step_interval", "Steps between two log lines; 0 is none"),
        Flag("log_level", "The least important lines that are logged", choices=LOG_LEVELS),
        Flag("access_log", "Log a line for each request when it is over: counts and times, never texts"),
        Flag("profile", "Write a trace of the first 100 steps, their phases named, into this directory", metavar="DIR"),
    ),
)

LIMITS = FlagGroup(
    "server limits",
    ServerLimits,
    (
        Flag("max_body_mb", "Longest body of a request, in MB of 2**20 bytes; beyond it clients get a 413"),
        Flag("max_connections", "Connections at once; fewer where `ulimit -n` says so"),
        Flag("header_timeout", "Seconds that a client has for a request's headers"),
        Flag("body_timeout", "Seconds that a client has for a request's body"),
        Flag("idle_timeout", "Seconds that a connection may rest between requests, or its client may not read"),
        Flag("max_schema_kb", "Longest JSON schema or regular expression of a response_format, in KB of 2**10 bytes"),
        Flag("grammar_timeout", "Seconds that compiling one may take; beyond them clients get a 400"),
    ),
)

KV_EVENTS = FlagGroup(
    "KV events (for routers; see docs/routing.md)",
    KvEventsConfig,
    (
        Flag(
            "kv_events_endpoint",
            "Publish what is cached as it changes, token ids too, as in tcp://127.0.0.1:5557: vLLM's events over "
            "ZeroMQ. A loopback address or * is listened to, another host connected to; ipc:///PATH is a socket file, "
            "which only those read that can enter its directory. Default: nothing is published",
            metavar="tcp://HOST:PORT",
        ),
        Flag("kv_events_topic", "Topic of the events; those of recurrent states have .states behind it"),
        Flag(
            "kv_events_replay_endpoint",
            "Where subscribers ask for events that they have lost; default: nowhere",
            metavar="tcp://HOST:PORT",
        ),
        Flag("kv_events_buffer_steps", "Messages that are kept for them; beyond those they get all that is cached"),
    ),
)

ACCESS = FlagGroup(
    "access (see docs/server.md and SECURITY.md)",
    AccessConfig,
    (
        Flag(
            "api_key",
            "What clients must send as Authorization: Bearer KEY; whoever sees the processes sees it here. "
            "Default: the variable MEGATRON_EXT_API_KEY, else everybody is let in",
        ),
        Flag(
            "api_key_file", "File with a key in each line; each key's clients have a cache of their own", metavar="FILE"
        ),
        Flag(
            "admin_key_file",
            "File with the only key for /prefix_cache and /reset_prefix_cache; default: a single API key opens them",
            metavar="FILE",
        ),
        Flag(
            "allowed_hosts",
            "Names under which the server may be asked, * is any; default: the loopback names, with API keys any",
            metavar="HOST",
        ),
        Flag(
            "hide_cache_counts",
            "Say of no prompt what was cached; counts and metrics are for the admin key",
        ),
        Flag(
            "chat_control_tokens",
            "What special tokens are that a message of the system, a user or a tool spells: text, or the tokens",
            choices=CONTROL_TOKENS,
        ),
        Flag(
            "cors_allowed_origins",
            "Web pages of these origins may ask this server, * is any; default: none may",
            metavar="ORIGIN",
        ),
        Flag(
            "enable_admin_routes",
            "Routes to sleep, to wake up, to end requests and to read new weights; needs an admin key",
        ),
        Flag(
            "weights_root",
            "With --enable-admin-routes: new weights are read from directories below this one only",
            metavar="DIR",
        ),
    ),
)
