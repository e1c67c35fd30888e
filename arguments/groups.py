"""All flags of the command line, in the groups of `--help`; each flag is declared in the field that it sets."""

from __future__ import annotations

from arguments.flags import FlagGroup
from megatron_ext.config import (
    BatchingConfig,
    CacheConfig,
    ParallelConfig,
    RequestParams,
    RunConfig,
    ServerConfig,
    ServerLimits,
    SourceConfig,
    TokenizerConfig,
)
from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.config.model_fields import ModelFields
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.config.server import AccessConfig
from megatron_ext.config.speculation import SpeculationConfig

SOURCE = FlagGroup("weights", SourceConfig)
TOKENIZER = FlagGroup("tokenizer", TokenizerConfig)
MODEL = FlagGroup("model (random weights if no checkpoint is given)", ModelFields)
PARALLEL = FlagGroup("parallelism", ParallelConfig)
SAMPLING = FlagGroup("sampling (greedy by default; a line of a prompt file overrides these)", RequestParams)
BATCHING = FlagGroup("batching", BatchingConfig)
CACHE = FlagGroup("prefix caching", CacheConfig)
ROUTING = FlagGroup("routing among replicas (see docs/routing.md)", RoutingConfig)
SPECULATION = FlagGroup(
    "speculative decoding (the same tokens in fewer steps; see docs/speculation.md)", SpeculationConfig
)
RUN = FlagGroup("run", RunConfig)
SERVER = FlagGroup("server", ServerConfig)
LIMITS = FlagGroup("server limits", ServerLimits)
KV_EVENTS = FlagGroup("KV events (for routers; see docs/routing.md)", KvEventsConfig)
ACCESS = FlagGroup("access (see docs/operating.md and SECURITY.md)", AccessConfig)

# By the fields of `EngineSettings`.
ENGINE = {
    "parallel": PARALLEL,
    "batching": BATCHING,
    "cache": CACHE,
    "routing": ROUTING,
    "speculation": SPECULATION,
}
GROUPS = (SOURCE, TOKENIZER, MODEL, SAMPLING, *ENGINE.values(), RUN)
SERVER_GROUPS = (SOURCE, TOKENIZER, MODEL, *ENGINE.values(), SERVER, KV_EVENTS, LIMITS, ACCESS)
