"""Figures of benchmarks that users see: a chat's computed tokens, and those of one's own model or server."""

from __future__ import annotations

import json

import pytest

from benchmarks.cases import VOCABULARY
from benchmarks.goals import CHAT_TOKENS
from benchmarks.peers.sizes import CHATS
from benchmarks.peers.work import chat
from megatron_ext.bench.clients import PendingOutput
from megatron_ext.bench.command import main
from megatron_ext.bench.figures import figures
from megatron_ext.bench.work import KINDS
from megatron_ext.config import ServerConfig
from megatron_ext.server.serving import Serving
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.server import LiveServer, tiny_engine
from tests.unit_tests.support.simulated_engine import SimulatedEngine


def test_a_chat_computes_few_tokens():
    """HY-4, SC-3: at most 6,800 of 19,072 prompt tokens of eight conversations are computed, more without snapshots."""
    computed = sum(tokens for _, tokens in chat(SimulatedEngine(), CHATS, VOCABULARY))
    assert 0 < computed <= CHAT_TOKENS
    assert sum(tokens for _, tokens in chat(SimulatedEngine(slots=0), 2, VOCABULARY)) > CHAT_TOKENS / 4


def test_figures_of_known_answers():
    """OB-2: failed answers are counted and excluded from all other figures."""
    good = [
        PendingOutput("a", 10.0, [10.1, 10.2, 10.4], 10.5, "x", 100, 60, 3),
        PendingOutput("a", 20.0, [20.3], 20.4, "x", 100, None, 1),
    ]
    bad = PendingOutput("a", 30.0, [30.1], 90.0, "x", 7, 7, 7, "no")
    told = figures([*good, bad], 2.0)
    assert (told["requests"], told["failed"], told["errors"]) == (2, 1, {"no": 1})
    assert (told["prompt_tokens"], told["generated_tokens"], told["skipped_share"]) == (200, 4, 0.6)
    assert (told["generated_per_second"], told["requests_per_second"]) == (2.0, 1.0)
    assert told["ttft_ms"] == {"p50": 100.0, "p90": 300.0, "p99": 300.0, "mean": 200.0, "max": 300.0}
    assert told["inter_token_ms"]["max"] == 200.0
    assert told["end_to_end_ms"]["p50"] == 400.0


@pytest.fixture(scope="module")
def server() -> LiveServer:
    engine = tiny_engine(tokenizer=NullTokenizer(97))
    live = LiveServer(Serving(engine, "tiny", ServerConfig(api_key="secret", shutdown_timeout=1.0)))
    yield live
    live.stop()


def test_requests_to_a_server(server, tmp_path, monkeypatch, capsys):
    """OB-2: token counts are those of the server, and the API key is in no file."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    file = tmp_path / "figures.json"
    small = "--requests 6 --prefix 20 --own 6 --generate 4 --concurrency 3 --numbers 90"
    assert main([*small.split(), "--url", f"{server.url}/v1", "--json", str(file)]) == 0, capsys.readouterr()
    told = json.loads(file.read_text())["figures"]
    assert "secret" not in file.read_text()
    assert list(told) == list(KINDS)
    assert server.metric("tokens_generated_total") == 2 + sum(one["generated_tokens"] for one in told.values())
    assert told["shared"]["skipped_share"] > 0
