"""SI-4: comparisons with the settings of a running server, from a recorded trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_ext.simulation.cached_models import MODELS, KnownModel
from megatron_ext.simulation.formats import read_trace
from megatron_ext.simulation.machine import Machine
from megatron_ext.simulation.running import RunningServer
from megatron_ext.simulation.server_advice import comparisons, settings_of
from megatron_ext.simulation.sweep import Batch, Settings, sweep
from megatron_ext.simulation.trace import longest_request

TRACE = Path(__file__).parents[3] / "benchmarks" / "simulation" / "traces" / "coding_agents_20.jsonl.xz"


def build_server(model: str = "nemotron-h-8b", share: float = 0.05) -> RunningServer:
    turns = read_trace(TRACE, 100)
    known = KnownModel(MODELS[model].costs(64), longest_request(turns))
    return RunningServer(turns, known, Settings(8.0, share, 64, "lru"), Batch())


@pytest.fixture(scope="module")
def advised():
    """Comparisons of a server with few snapshot slots, results by settings, and lines by subject."""
    found = comparisons(build_server(), [4.0, 8.0, 16.0], [0.05, 0.5], ["flops", "lru"])
    server = build_server()
    points = {one.settings: one for one in sweep(server.turns, server.model, settings_of(found), Batch(), Machine())}
    return found, points, {one.subject: one.line(points) for one in found}


def test_each_setting_differs_in_one_respect(advised):
    found, points, _ = advised
    own = found[0].own
    assert list(points) == [
        own,
        dataclasses.replace(own, memory_gib=4.0),
        dataclasses.replace(own, memory_gib=16.0),
        dataclasses.replace(own, state_share=0.5),
        dataclasses.replace(own, policy="flops"),
    ]


def test_lines_say_what_each_would_have_skipped(advised):
    found, points, lines = advised
    assert list(lines) == ["memory", "split", "policy"]
    for comparison in found:
        line = lines[comparison.subject]
        for settings in (comparison.own, *comparison.others):
            assert f"{points[settings].skipped_tokens:,} tokens ({points[settings].skipped_share:.1%})" in line
    assert "now 8 GiB" in lines["memory"]
    assert "--" not in lines["memory"]


def test_flags_of_what_is_worth_it(advised):
    """A split that skips more is named by its flags; a choice that gains nothing is not."""
    found, points, lines = advised
    own, better = found[1].own, found[1].others[0]
    assert points[better].skipped_tokens > 1.2 * points[own].skipped_tokens
    prefix = "--inference-dynamic-batching"
    blocks = points[better].blocks
    assert f"take {prefix}-block-count {blocks} {prefix}-prefix-caching-mamba-gb 4" in lines["split"]
    equal = {settings: dataclasses.replace(points[own], settings=settings) for settings in points}
    assert found[1].line(equal).endswith("keep it")
    assert found[2].line(equal).endswith("keep it")


def test_a_moving_border_is_named(advised):
    """Without a share, blocks and snapshots share the memory."""
    _, points, _ = advised
    split = comparisons(build_server(), [], [None, 0.5], [])[1]
    own, moving = points[split.own], split.others[0]
    found = points | {moving: dataclasses.replace(own, settings=moving)}
    assert f"; a moving border skips {own.skipped_tokens:,} tokens" in split.line(found)


def test_a_model_without_recurrent_layers_has_no_split():
    server = build_server("llama-3-8b", 0.0)
    split = comparisons(server, [8.0], server.shares(), ["lru"])[1]
    assert split.others == ()
    points = {one.settings: one for one in sweep(server.turns[:20], server.model, [split.own], Batch(), Machine())}
    assert split.line(points).startswith("split: now 0 of it for snapshots skips")
