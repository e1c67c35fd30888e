"""Standard rows of benchmarks: sizes, what peers are asked for, stand-ins of peers, and the tables of documents."""

from __future__ import annotations

import ctypes
import json
import re
import stat
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.__main__ import Runner, chosen
from benchmarks.cases import CASES, VOCABULARY, Run, empty_page
from benchmarks.goals import CHAT_TOKENS
from benchmarks.models import nemotron_h
from benchmarks.peers import gguf_file, llama_cpp
from benchmarks.peers.sizes import CHATS, SIZES
from benchmarks.peers.transformers_script import Script
from benchmarks.peers.work import (
    LATER,
    PRELOADED,
    PROBE,
    RATE,
    READ,
    READ_ONCE,
    STEP,
    WEIGHTS,
    StandardRows,
    chat,
    decode_row,
    serve,
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


@pytest.mark.parametrize(("key", "parameters"), [("5m", 5_344_704), ("250m", 248_769_024)])
def test_sizes_are_those_of_the_models(key: str, parameters: int) -> None:
    """The bytes of a decode step are those of all matrices but the embedding; operations follow the matrices."""
    shape = SIZES[key].shape
    with torch.device("meta"):
        model = nemotron_h(shape)
    assert sum(one.numel() for one in model.parameters()) == parameters
    matrices = sum(one.numel() for name, one in model.named_parameters() if one.dim() == 2 and "embed" not in name)
    assert shape.step_bytes == 4 * matrices
    first, second = (shape.prefill_operations([length]) for length in (1_000, 2_000))
    assert 2 < second / first < 2.5
    assert shape.prefill_operations([2_176], 2_048) < first / 5


def test_the_published_size_is_that_of_its_model() -> None:
    """The bytes of a decode step are those of all matrices of SmolLM2-135M, whose output layer is its embedding."""
    shape = SIZES["smollm2"].shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.pattern.count("*"),
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(one.numel() for one in model.parameters()) == 134_515_008
    assert shape.step_bytes == 4 * sum(one.numel() for one in model.parameters() if one.dim() == 2)


def test_cases_of_each_peer_and_size() -> None:
    """One definition of the rows: the sizes have the same cases, which `make bench` measures."""
    of_published = ("ours", "ours_int8", "llama_f32", "llama_q8_0")
    expected = {
        f"standard.{peer}_{key}": key
        for key, size in SIZES.items()
        for peer in (*of_published, *(() if size.published else ("transformers", "vllm")))
    }
    assert {name: one.model for name, one in CASES.items() if name.startswith("standard.")} == expected
    assert all(CASES[name].in_bench for name in expected)


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


def test_the_script_copies_caches(tmp_path: Path) -> None:
    """Tokens of the plain script are those of transformers' own forward, alone, in a batch and after a prefix."""
    torch.manual_seed(1)
    model = nemotron_h(QUICK.shape).eval()
    model.save_pretrained(tmp_path)
    script = Script(str(tmp_path), 64)
    prompts = [[(7 * i + 3 * row) % 4_000 + 8 for i in range(70)] for row in range(2)]
    prompts[1][:40] = prompts[0][:40]
    with torch.inference_mode():
        expected = [
            model.generate(torch.tensor([one]), max_new_tokens=3, min_new_tokens=3, do_sample=False)[0, 70:].tolist()
            for one in prompts
        ]
    for shared, cached in ((0, [0, 0]), (40, [0, 40])):
        script.forget(shared)
        records, _ = serve(script, prompts, 2, 3)
        assert [one.tokens for one in records] == expected
        assert [one.cached for one in records] == cached


VLLM = {
    "vllm/model_executor/layers/mamba/abstract.py": "class MambaBase:\n    get_kv_cache_spec = 'cuts'\n",
    "vllm/model_executor/layers/mamba/mamba_mixer2.py": "class MambaMixer2:\n    get_kv_cache_spec = 'no states'\n",
    "vllm/__init__.py": """
from types import SimpleNamespace as Some
__version__ = "stand-in"
SamplingParams = TokensPrompt = lambda **options: Some(**options)
class LLM:
    def __init__(self, **options):
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
        assert MambaMixer2.get_kv_cache_spec == "cuts" and options["enable_prefix_caching"]
        self.llm_engine, self.live = self, {}
    def reset_prefix_cache(self):
        assert not self.live
    def add_request(self, name, prompt, params):
        self.live[name] = [params.max_tokens, []]
    def step(self):
        for name, (count, tokens) in list(self.live.items()):
            tokens.append(len(tokens))
            if len(tokens) == count:
                del self.live[name]
            output = Some(token_ids=tokens)
            yield Some(request_id=name, outputs=[output], num_cached_tokens=None, finished=len(tokens) == count)
""",
}


@pytest.mark.long
def test_vllm_runs_in_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of vLLM in an interpreter of its own; without VLLM_PYTHON the case is left out."""
    for name, text in VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n', "utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("benchmarks.__main__._shared_model", lambda folder, size, published, quick: folder)
    runner = Runner(Namespace(quick=True, threads=1), {})
    case = CASES["standard.vllm_5m"]
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert "VLLM_PYTHON is not set" in runner.run_case(case, 100.0, tmp_path)["left_out"][0]
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    page = runner.run_case(case, 100.0, tmp_path)
    assert (page["failed"], set(page["rows"])) == ({}, ROWS)
    assert page["remarks"][0].startswith("vLLM stand-in, torch")
    advised = Path(torch.__file__).parent / "lib/libc10.so"
    monkeypatch.setenv("VLLM_PRELOAD", str(advised))
    page = runner.run_case(case, 100.0, tmp_path)
    assert (page["failed"], page["rows"].get(PRELOADED)) == ({}, {PRELOADED: advised.name})
    monkeypatch.setenv("VLLM_PRELOAD", f"{advised}:{tmp_path}/none.so")
    failure = runner.run_case(case, 100.0, tmp_path)["failed"]["case"]
    assert failure.startswith(f"ValueError: VLLM_PRELOAD: {tmp_path}/none.so cannot be loaded")


class LlamaLibrary(ModuleType):
    """Stand-in of llama-cpp-python: the next token is one more than the last, modulo 100; sequences are lists."""

    __version__ = "stand-in"

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.memory: dict[int, list[int]] = {}
        self.computed = 0
        for name in ("log_callback", "log_set", "model_load_from_file", "get_memory", "free"):
            setattr(self, f"llama_{name}", lambda *arguments: arguments[0] or self)
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace

    def llama_init_from_model(self, model: object, options: SimpleNamespace) -> LlamaLibrary:
        self.memory = {number: [] for number in range(options.n_seq_max)}
        return self

    def llama_batch_init(self, count: int, *_: int) -> SimpleNamespace:
        columns = {name: [None] * count for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(seq_id=[[0] for _ in range(count)], n_tokens=0, **columns)

    def llama_memory_seq_cp(self, _: object, source: int, target: int, *__: int) -> None:
        assert not self.memory[target]
        self.memory[target] = list(self.memory[source])

    def llama_memory_seq_rm(self, _: object, number: int, *__: int) -> None:
        self.memory[number] = []

    def llama_decode(self, _: object, batch: SimpleNamespace) -> int:
        for place in range(batch.n_tokens):
            tokens = self.memory[batch.seq_id[place][0]]
            assert batch.pos[place] == len(tokens), "positions follow each other"
            tokens.append(batch.token[place])
        self.computed += batch.n_tokens
        self.batch = batch
        return 0

    def llama_get_logits_ith(self, _: object, place: int) -> Any:
        assert self.batch.logits[place], "logits were asked for"
        logits = (ctypes.c_float * QUICK.shape.vocabulary)()
        logits[(self.batch.token[place] + 1) % 100] = 1.0
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


def test_llama_cpp_keeps_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix is computed once and copied, a conversation continues its sequence, and no sequence is lost."""
    library = LlamaLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    peer, run = llama_cpp.Llama(Path("none.gguf"), QUICK), Run(quick=True)
    StandardRows(run, peer, QUICK).measure()
    rows = run.page["rows"]
    assert set(rows) == ROWS
    assert rows[shared_row(256)]["skipped tokens"] == 256
    assert rows["chat, all turns"]["computed tokens"] == 200 + 3 * (200 + 1)
    assert sum(map(bool, library.memory.values())) == 1, "the last conversation is kept"
    peer.forget(256)
    prompts = [[*range(256), *range(row, row + 128)] for row in range(3)]
    library.computed = 0
    records, _ = serve(peer, prompts, 2, 4)
    assert [one.tokens for one in records] == [[(row + 128 + i) % 100 for i in range(4)] for row in range(3)]
    assert [one.cached for one in records] == [0, 256, 256]
    assert library.computed == 256 + 3 * (128 + 3)
    assert [len(tokens) for tokens in library.memory.values() if tokens] == [256]


def test_gguf_tensors_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Each tensor of the checkpoint is in the file once, in the shape that llama.cpp reads."""
    nemotron_h(QUICK.shape).save_pretrained(tmp_path)
    stored = gguf_file._stored(tmp_path / "model.safetensors")
    found = dict(gguf_file._tensors(stored, QUICK.shape))
    assert len(found) == len(stored)
    assert sum(one.size for one in found.values()) == sum(one.size for one in stored.values())
    assert {one.dtype for one in found.values()} == {numpy.dtype("float32")}
    shapes = {name: found[f"blk.0.{name}"].shape for name in ("ssm_conv1d.weight", "ssm_a", "ssm_norm.weight")}
    assert shapes == {"ssm_conv1d.weight": (768, 4), "ssm_a": (16, 1), "ssm_norm.weight": (2, 256)}
    assert (found["blk.0.ssm_a"] < 0).all()


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


def test_int8_is_beside_int8_and_ours_in_fp32() -> None:
    """Rows in int8 are over ours in fp32 and over Q8_0; rows in fp32 are over no quantized peer."""
    measured = pages()
    for name, step in (("ours_int8", 30.0), ("llama_q8_0", 20.0)):
        measured[f"standard.{name}_250m"] = empty_page() | {"rows": {decode_row(1): {STEP: step}}}
    measured["standard.ours_int8_250m"]["rows"] |= {decode_row(one): {STEP: 33.0} for one in (4, 8, 16)}
    lines = standard_table(measured, "CPU").splitlines()
    assert lines[0].endswith("| ours | over the floor | over ours in fp32 | over vLLM's | over llama.cpp's, Q8_0 |")
    decode = {
        line.split(":")[0]: [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "decode" in line
    }
    assert decode == {
        "| 0.25 B, fp32": ["61 / 64 / 68 / 76", "", "", "0.5 / - / - / -", ""],
        "| 0.25 B, int8": ["30 / 33 / 33 / 33", "", "0.492 / 0.516 / 0.485 / 0.434", "", "1.5 / - / - / -"],
    }


def test_no_step_is_below_the_floor() -> None:
    """The floor is of the fastest reader of the run: a loop that only reads, or a step of any engine in fp32."""
    measured = pages()
    llama = measured["standard.llama_f32_250m"] = empty_page() | {"rows": {decode_row(1): {STEP: 36.6, READ: 50.0}}}
    measured["standard.llama_q8_0_250m"] = empty_page() | {"rows": {decode_row(1): {STEP: 10.0, READ: 183.0}}}
    add_floors(measured)
    found = measured["standard.ours_250m"]["rows"][decode_row(1)]
    assert (found["weights read once, ms"], found[READ_ONCE]) == pytest.approx((36.6, 61.0 / 36.6), rel=1e-3)
    del llama["rows"][decode_row(1)]
    add_floors(measured)
    assert found[READ_ONCE] == pytest.approx(4 / 3)


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
