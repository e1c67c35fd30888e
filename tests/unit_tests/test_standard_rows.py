"""Standard rows of benchmarks: sizes, what peers are asked for, stand-ins of peers, and the tables of documents."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import chosen
from benchmarks.cases import VOCABULARY, Run, empty_page
from benchmarks.goals import CHAT_TOKENS
from benchmarks.peers.sizes import CHATS, SIZES
from benchmarks.peers.work import (
    LATER,
    PRELOADED,
    PROBE,
    RATE,
    READ,
    STEP,
    WEIGHTS,
    StandardRows,
    chat,
    decode_row,
    shared_row,
)
from benchmarks.summary import MACHINE, add_floors, main, other_tokens, standard_table, updated
from tests.unit_tests.support.simulated_engine import SimulatedEngine
from tests.unit_tests.support.source import ROOT

QUICK = SIZES["5m"].quick()
ROWS = {
    PROBE,
    "256 shared, 1 at once",
    "256 shared, 8 at once",
    "unique, 8 at once",
    "decode of 1",
    "decode of 2",
    *(f"chat, turn {turn}" for turn in (1, 2, 3, 4)),
    "chat, all turns",
}


@pytest.fixture(scope="module", autouse=True)
def _cases() -> None:
    chosen(["standard"])


def test_a_chat_computes_few_tokens() -> None:
    """HY-4, SC-3: at most 6,800 of 19,072 prompt tokens of eight conversations are computed, more without snapshots."""
    computed = sum(tokens for _, tokens in chat(SimulatedEngine(), CHATS, VOCABULARY))
    assert 0 < computed <= CHAT_TOKENS
    assert sum(tokens for _, tokens in chat(SimulatedEngine(slots=0), 2, VOCABULARY)) > CHAT_TOKENS / 4


def test_rows() -> None:
    """Rows of an engine that caches; a sequential peer has none of several requests at once."""
    run = Run(quick=True)
    StandardRows(run, SimulatedEngine(), QUICK).measure()
    rows = run.page["rows"]
    assert set(rows) == ROWS
    assert rows[shared_row(256)]["skipped tokens"] == 256
    assert rows["unique, 8 at once"]["skipped tokens"] == 0
    assert all(float(rows[decode_row(count)][STEP] or 0) > 0 for count in (1, 2))
    alone = Run(quick=True)
    StandardRows(alone, SimulatedEngine(), QUICK, is_sequential=True).measure()
    assert set(alone.page["rows"]) == ROWS - {"256 shared, 8 at once", "unique, 8 at once"}


def pages() -> dict[str, Any]:
    ours = {
        shared_row(2_048): {"first ttft, ms": 4_000.0, LATER: 400.0, "first / floor": 1.25, "later / floor": 2.0},
        shared_row(2_048, 8): {RATE: 30.0, LATER: 500.0},
        **{decode_row(one): {STEP: 60.0 + one, READ: 30.0} for one in (1, 4, 8, 16)},
        WEIGHTS: {READ: 40.0},
        PROBE: {PROBE: "1 2 3"},
    }
    vllm = {
        shared_row(2_048): {"first ttft, ms": 8_000.0, LATER: 1_600.0},
        decode_row(1): {STEP: 122.0, READ: 15.0},
        PROBE: {PROBE: "1 2 4"},
    }
    return {"standard.ours_250m": empty_page() | {"rows": ours}, "standard.vllm_250m": empty_page() | {"rows": vllm}}


def test_the_table_has_ratios() -> None:
    """Ours, over the floor and over each peer that was measured; what was not is left out."""
    measured = pages()
    measured["standard.vllm_250m"]["rows"][PRELOADED] = {PRELOADED: "libtcmalloc.so"}
    add_floors(measured)
    lines = standard_table(measured, "CPU (avx2), 2 of 2 cores").splitlines()
    assert lines[0].endswith("| ours | over the floor | over vLLM's (libtcmalloc.so preloaded) |")
    cells = {line.split(" | ")[0]: [cell.strip(" |") for cell in line.split(" | ")[1:]] for line in lines}
    assert lines[0].startswith("| CPU (avx2), 2 of 2 cores, one run")
    assert cells["| 0.25 B, fp32: cold time to first token, 2,048 and 128 own tokens, ms"] == ["4,000", "1.25", "0.5"]
    (decode,) = (row for name, row in cells.items() if "decode step of 1 / 4 / 8 / 16 requests" in name)
    assert decode == ["61 / 64 / 68 / 76", "1.33 / 1.33 / 1.33 / 1.33", "0.5 / - / - / -"]
    (rate,) = (row for name, row in cells.items() if "shared: generated tokens/s" in name)
    assert rate == ["30", "", ""]
    assert not any("nothing shared" in name for name in cells)
    assert other_tokens(pages()) == ["standard.vllm_250m generates other tokens than standard.ours_250m"]


def test_documents_are_updated_between_their_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal figures give an equal document; a document without marks is left as it is."""
    figures, document, other = tmp_path / "figures.json", tmp_path / "document.md", tmp_path / "other.md"
    figures.write_text(json.dumps({MACHINE: "CPU", **pages()}), "utf-8")
    marks = "<!-- benchmarks: {} -->\nstale text\n<!-- benchmarks: end -->\n"
    document.write_text(f"before\n{marks.format('standard')}between\n{marks.format('goals')}after\n", "utf-8")
    other.write_text("no marks\n", "utf-8")
    assert main([str(figures), "--update", str(document)]) == 0
    text = document.read_text("utf-8")
    assert re.search(r"before\n<!-- .*\n\n\| CPU, one run of `make bench` \|", text)
    assert "| 0.25 B, decode of 1: step / vLLM's | 0.5 | at most 0.85 | met |" in text
    assert "stale text" not in text
    assert text.endswith("<!-- benchmarks: end -->\nafter\n")
    assert updated(document, pages(), "CPU") == text
    assert main([str(figures), "--update", str(document), str(other)]) == 2
    assert "benchmarks.summary: error" in capsys.readouterr().err
    assert other.read_text("utf-8") == "no marks\n"
    assert main([str(figures)]) == 0
    assert capsys.readouterr().out.startswith("| CPU, one run")


def test_the_results_have_places_for_the_tables() -> None:
    """Both tables."""
    path = ROOT / "benchmarks/RESULTS.md"
    assert re.findall(r"<!-- benchmarks: (\w+) -->", path.read_text("utf-8")) == ["standard", "end", "goals", "end"]
    text = updated(path, pages(), "CPU")
    assert "| CPU, one run of `make bench` |" in text
    assert "| 0.25 B, decode of 1: step / vLLM's | 0.5 |" in text
