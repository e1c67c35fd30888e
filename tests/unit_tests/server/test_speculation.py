"""Drafts in the server's outputs (usage, metrics, the page), and draft options of a body (SP-1, SP-7)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config import BatchingConfig, CacheConfig
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.server.request_manager import TokenClock
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.server import LiveServer
from tests.unit_tests.support.tokenizers import PieceTokenizer

PROMPT = [5, 6, 7, 8] * 10
NGRAM = SpeculationConfig("ngram", 3, speculative_adaptive=False)


def engine(speculation: SpeculationConfig) -> InferenceEngine:
    return build_engine(
        build_slow_decay(HYBRID),
        HYBRID,
        PieceTokenizer(HYBRID.vocab_size),
        BatchingConfig(block_size=16, block_count=200, max_requests=8),
        CacheConfig(snapshot_slots=16),
        dtype=torch.float32,
        speculation=speculation,
    )


@pytest.fixture(scope="module")
def drafting(serve) -> LiveServer:
    return serve(engine(NGRAM))


@pytest.fixture(scope="module")
def plain(serve) -> LiveServer:
    return serve(engine(NO_SPECULATION))


def ask(server, **fields):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True} | fields
    return server.http.post("/v1/completions", json=body)


def test_usage_and_metrics_count_accepted_drafts(drafting, plain):
    """SP-7: the answer equals that of a server without drafts, whose usage has no draft counts."""
    names = [("draft_tokens_total", {}), ("accepted_draft_tokens_total", {})]
    names += [("draft_tokens_by_position_total", {"position": str(i)}) for i in (1, 2, 3)]
    before = [drafting.metric(name, **labels) for name, labels in names]
    expected, drafted = ask(plain).json(), ask(drafting).json()
    assert drafted["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert "completion_tokens_details" not in expected["usage"]
    details = drafted["usage"]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert accepted + rejected > 0
    after = [drafting.metric(name, **labels) for name, labels in names]
    drafts, used, *by_position = (now - then for now, then in zip(after, before, strict=True))
    assert (drafts, used) == (accepted + rejected, accepted)
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == accepted + rejected
    assert plain.metric("draft_tokens_total") == 0
    assert "by_position" not in plain.http.get("/metrics").text
    assert "by_position" in drafting.http.get("/metrics").text


def test_a_request_can_have_none(drafting):
    """SP-1: 0 is off, fewer is fewer, and more than K is an error that says K."""
    before = drafting.metric("draft_tokens_total")
    assert "completion_tokens_details" not in ask(drafting, num_speculative_tokens=0).json()["usage"]
    assert drafting.metric("draft_tokens_total") == before
    third = drafting.metric("draft_tokens_by_position_total", position="3")
    ask(drafting, num_speculative_tokens=1)
    assert drafting.metric("draft_tokens_by_position_total", position="3") == third
    answer = ask(drafting, num_speculative_tokens=4)
    assert answer.status_code == 400
    assert "num_speculative_tokens 4 must be at most --num-speculative-tokens 3" in answer.text


def test_tokens_that_come_together_share_their_time(monkeypatch):
    clock, now = TokenClock(), iter([0.0, 1.0, 4.0])
    own_time = SimpleNamespace(monotonic=lambda: next(now))  # other threads use the module of the process
    monkeypatch.setattr("megatron_ext.server.request_manager.time", own_time)
    assert clock.gaps({0: 1}) == []
    assert clock.gaps({0: 2}) == [1.0]
    assert clock.gaps({0: 5}) == [1.0, 1.0, 1.0]
