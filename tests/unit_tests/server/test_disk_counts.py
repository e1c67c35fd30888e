"""Counts of a server's cache in memory, on disk and of its audits: metrics, `/prefix_cache` and the page agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families

from megatron_ext.config import CacheConfig
from megatron_ext.mcore.warm_restart_setup import open_disk_cache
from megatron_ext.models.identity import cache_facts, weights_digest
from megatron_ext.models.load import LoadedModel
from megatron_ext.server.http.status_page import PAGE
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.server import PATIENCE, LiveServer, tiny_engine
from tools.pages.reference import metric_families

PROMPT = make_prompt(40, seed=3)
FIELDS = {
    "on": "is_on",
    "blocks": "blocks",
    "snapshots": "snapshots",
    "bytes": "bytes",
    "limit_bytes": "limit_bytes",
    "other_entries": "other_entries",
    "hits_total": "hits",
    "entries_loaded_total": "loaded",
    "entries_read_total": "read",
    "entries_written_total": "written",
    "entries_left_out_total": "left_out",
    "read_bytes_total": "read_bytes",
    "written_bytes_total": "written_bytes",
    "read_seconds_total": "read_seconds",
    "write_seconds_total": "write_seconds",
    "entries_evicted_total": "evicted",
    "loads_total": "loads",
    "loads_slower_total": "loads_slower",
    "load_waits_total": "load_waits",
    "load_bytes_total": "load_bytes",
    "load_seconds_total": "load_seconds",
}
ENDS = {"loads_placed", "loads_failed", "loads_late", "loads_useless"}


def started(serve: Callable[..., LiveServer], directory: Path) -> LiveServer:
    """A server with audits whose cache is kept in a directory."""
    cache = CacheConfig(
        snapshot_slots=16,
        audit_interval=1,
        explain_prefix_cache=True,
        prefix_cache_dir=str(directory),
        prefix_cache_disk_gb=0.05,
        prefix_cache_drain_seconds=PATIENCE,
    )
    engine = tiny_engine(cache=cache)
    model = engine.controller.inference_wrapped_model.model
    loaded = LoadedModel(model, None, NullTokenizer(97), torch.float32, "tiny")
    open_disk_cache(engine, cache_facts(loaded, weights_digest(model)), cache)
    return serve(engine)


def complete(server: LiveServer, prompt: list[int], **fields: object) -> dict:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4} | fields
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    server.wait_until(lambda: not server.in_engine_thread(lambda: server.engine.core.is_busy))  # with its audit
    server.check_idle()
    return response.json()


def sources(server: LiveServer) -> tuple[float, float]:
    names = ("memory", "disk")
    memory, disk = (server.metric("prompt_tokens_skipped_by_source_total", source=name) for name in names)
    assert memory + disk == server.metric("prompt_tokens_skipped_total")
    return memory, disk


def test_counts_of_a_restart(serve, tmp_path):
    """DC-1, EX-15: entries, bytes, hits, loads, seconds and drops; skipped tokens by where their entries had been."""
    first = started(serve, tmp_path / "cache")
    complete(first, PROMPT)
    complete(first, PROMPT)
    assert sources(first) == (32, 0)
    assert first.metric("prefix_cache_disk_hits_total") == 0
    first.stop()

    second = started(serve, tmp_path / "cache")
    assert second.metric("prefix_cache_disk_entries_loaded_total") > 0
    assert second.metric("prefix_cache_disk_read_seconds_total") > 0
    assert sources(second) == (0, 0)
    complete(second, PROMPT)
    assert sources(second) == (0, 32)
    own = make_prompt(40, seed=4)
    complete(second, own)
    complete(second, own)
    assert sources(second) == (32, 32)
    shown = second.http.get("/prefix_cache").json()["disk"]
    assert {name: second.metric(f"prefix_cache_disk_{name}") for name in FIELDS} == {
        name: shown[key] for name, key in FIELDS.items()
    }
    assert (shown["hits"], shown["skipped_tokens"], shown["is_on"]) == (1, 32, True)
    assert shown["read_bytes"] > 4096 < shown["bytes"]
    assert set(shown) == {*FIELDS.values(), *ENDS, "skipped_tokens", "drops"}
    assert second.metric("prefix_cache_disk_load_ends_total", outcome="placed") == shown["loads_placed"]
    assert second.metric("prefix_cache_disk_drops_total", reason="checksum") == 0
    assert second.metric("audits_completed_total") == 2
    assert second.metric("audit_seconds_total") > 0
    occupancy = second.http.get("/prefix_cache").json()["occupancy"]
    costs = second.engine.core.scheduler.limits.costs
    snapshots = occupancy["slots_used"] + occupancy["provisional_slots"]
    expected = occupancy["blocks_cached"] * costs.block_bytes + snapshots * costs.state_bytes
    assert second.metric("prefix_cache_bytes") == expected > 0

    second.http.post("/reset_prefix_cache")
    assert second.metric("prefix_cache_disk_bytes") == second.metric("prefix_cache_disk_blocks") == 0
    assert second.http.get("/prefix_cache").json()["disk"]["bytes"] == 0

    text = second.http.get("/metrics").text
    names = {family.name for family in text_string_to_metric_families(text) if not family.name.endswith("_created")}
    documented = {family.name for family in metric_families()}
    assert documented - names == {f"megatron_ext_{kind}draft_tokens_by_position" for kind in ("", "accepted_")}
    assert names <= documented
    read = {f"prefix_cache_disk_{name}" for name in re.findall(r'total\("(\w+)"\)', PAGE.split("drawAudits")[0])}
    read |= {f"{name}_total" for name in re.findall(r'total\("(\w+)"\)', PAGE.split("drawAudits")[1])}
    assert len(read) > 20
    assert {f"megatron_ext_{name}" for name in read} <= set(re.findall(r"^(\w+)", text, re.MULTILINE))
