"""Workload of a simulation: requests, model and settings; of a running server, as it describes them (SI-4)."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from megatron_ext.config import EvictionPolicyName
from megatron_ext.config.costs import EntryCosts
from megatron_ext.errors import ConfigError
from megatron_ext.http_client import opened
from megatron_ext.simulation.formats import read_requests
from megatron_ext.simulation.settings import GIB, Batch, CachedModel, Settings
from megatron_ext.simulation.trace import Turn

TIMEOUT = 60.0  # seconds
LONGEST_ANSWER = 2**28  # bytes


@dataclass(frozen=True)
class Workload:
    """Requests, and what serves them.

    Attributes:
        turns: The requests.
        model: Costs of the model.
        settings: Settings of the cache.
        batch: Limits of a step.
    """

    turns: list[Turn]
    model: CachedModel
    settings: Settings
    batch: Batch


def ask_server(url: str, key: str | None, max_requests: int | None = None) -> Workload:
    """Fetch trace, costs and settings from a server.

    Args:
        url: URL of the server, without a path.
        key: Key of an administrator; None for a server without keys.
        max_requests: Maximum number of requests.

    Raises:
        ConfigError: The server does not answer, refuses, has no cache, or has served nothing yet.
    """
    state = json.loads(_get(url, "/prefix_cache", key))
    if state["settings"]["policy"] is None:
        raise ConfigError(f"{url}: this server caches nothing; start it without --no-...-enable-prefix-caching")
    turns = read_requests(io.BytesIO(_get(url, "/prefix_cache/trace", key)), f"{url}/prefix_cache/trace", max_requests)
    return described(state, turns)


def described(state: Mapping[str, object], turns: list[Turn]) -> Workload:
    """Return the workload of a server, from its `/prefix_cache` and its trace."""
    costs = EntryCosts(**cast("dict[str, float]", state["costs"]))  # type: ignore[arg-type]  # ints among them
    geometry, set_ = cast("dict[str, int]", state["geometry"]), cast("dict[str, int]", state["settings"])
    of_states = (geometry["snapshot_slots"] or 0) * costs.state_bytes
    memory = geometry["blocks"] * costs.block_bytes + of_states
    is_shared = geometry.get("slabs") is not None  # then either of them would fill the memory
    settings = Settings(
        max(memory - of_states, of_states) / GIB if is_shared else memory / GIB,
        None if is_shared else of_states / memory,
        costs.block_size,
        EvictionPolicyName(set_["policy"]).value,
        str(set_["mode"]),
        set_.get("provisional_slots"),
    )
    names = [field.name for field in dataclasses.fields(Batch)]
    batch = Batch(**{name: set_[name] for name in names if name in set_})
    return Workload(turns, CachedModel(costs, set_["max_sequence_length"]), settings, batch)


def _get(url: str, path: str, key: str | None) -> bytes:
    with opened(url, path, key=key, flag="--server", timeout=TIMEOUT) as answer:
        content = answer.read(LONGEST_ANSWER + 1)
    if len(content) > LONGEST_ANSWER:
        raise ConfigError(f"{url}{path} answers more than {LONGEST_ANSWER} bytes")
    return content
