"""Benchmarks: their imports resolve, the cheapest pieces run, and published figures are computed correctly."""

from __future__ import annotations

import ast
import importlib
import json
import sys

import pytest
import torch

from benchmarks.goals import CHAT_TOKENS, Goal
from benchmarks.gpu import phases, processes, shapes, speed, work
from benchmarks.gpu.notes import Notes
from benchmarks.peers.work import CHATS, chat
from benchmarks.serving.__main__ import main
from benchmarks.serving.clients import PendingOutput
from benchmarks.serving.figures import figures
from benchmarks.serving.work import KINDS
from megatron_ext.config import ServerConfig
from megatron_ext.server.serving import Serving
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.server import LiveServer, tiny_engine
from tests.unit_tests.support.simulated_engine import SimulatedEngine
from tests.unit_tests.support.source import ROOT

OURS = ("arguments", "megatron_ext", "tools")


def test_imports_of_this_project_resolve():
    """Each name that a benchmark imports from the package exists; a mistake would show on the measured machine only."""
    names = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
                names |= {(node.module, one.name) for one in node.names}
    assert len(names) > 50
    missing = []
    for module, name in sorted(names):
        if not hasattr(importlib.import_module(module), name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                missing.append(f"{module}.{name}")
    assert missing == []


def test_speed_of_a_small_model(tmp_path):
    """CU-8: all figures of one model are there, with the cache seen to work, and no phase is left out."""
    tiny = work.Work("float32", (128,), (1, 2), (2,), 1, 512)
    notes = Notes(tmp_path / "figures.json", 60.0)
    speed.Speed(shapes.model_config("mamba2", shapes.SMALL), tiny, torch.device("cpu"), notes).measure()
    assert (notes.page["failed"], notes.page["left_out"]) == ([], [])
    found = notes.page["found"]
    for row in ("2 decode, graphs, tokens/s", "2 decode, eager, tokens/s", "128 tokens, 2 at once, warm ms"):
        assert found[row] > 0
    assert [name for name, place in phases.PLACES.items() if not hasattr(*place)] == []


WRITES = """
import json, sys, time
page = dict(found=dict(a=1.0), left_out=[], failed=[], seconds=0.0)
open(sys.argv[1], "w").write(json.dumps(page))
"""


@pytest.mark.parametrize(
    ("program", "found", "failed"),
    [
        (WRITES, {"a": 1.0}, []),
        (f"{WRITES}sys.exit(139)", {"a": 1.0, "the part": "ended with exit code 139"}, ["the part"]),
        ("pass", {"the part": "wrote nothing"}, ["the part"]),
    ],
)
def test_figures_of_a_part_remain_however_it_ends(program, found, failed, tmp_path):
    """CU-8: a kernel that takes its process with it costs only the later figures of its part."""
    file = tmp_path / "figures.json"
    ended = processes.run([sys.executable, "-c", program, str(file)], file, 60.0, {})
    assert (ended["found"], ended["failed"]) == (found, failed)


def test_a_chat_computes_few_tokens():
    """HY-4, SC-3: at most 6,800 of 19,072 prompt tokens of eight conversations are computed, more without snapshots."""
    computed = sum(turn["computed"] for turn in chat(SimulatedEngine(), CHATS))
    assert 0 < computed <= CHAT_TOKENS
    assert sum(turn["computed"] for turn in chat(SimulatedEngine(slots=0), 2)) > CHAT_TOKENS / 4


def test_verdicts_on_goals():
    assert Goal("a", 0.8, 0.8).verdict() == "met"
    assert Goal("a", 1.0, 0.8).verdict() == "missed by 25 %"
    assert Goal("a", 1.4, 1.3, is_upper_bound=False).verdict() == "met"
    assert Goal("a", 1.0, 1.5, is_upper_bound=False).verdict() == "missed by 50 %"
    assert Goal("a", None, 1.5).verdict() == "not measured"


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
