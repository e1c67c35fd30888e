"""PY-8: the programs of `examples/python/` work as described."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from examples.python import batch_file, convert, rl_loop, streaming, with_torchrun
from examples.python.golden import test_outputs as golden
from megatron_ext import RequestParams, load_engine
from tests.unit_tests.models.huggingface import oracles
from tests.unit_tests.models.test_load import write_tokenizer
from tests.unit_tests.support.source import ROOT

SMALL = {"inference_dynamic_batching_block_size": 16, "inference_dynamic_batching_buffer_size_gb": 0.1}


def test_all_of_them_are_here():
    """PY-8: a program that is added is run here, and named in the documentation."""
    programs = {path.name for path in (ROOT / "examples" / "python").iterdir()} - {"__init__.py", "__pycache__"}
    assert programs == {"batch_file.py", "streaming.py", "rl_loop.py", "golden", "convert.py", "with_torchrun.py"}
    text = (ROOT / "docs" / "python.md").read_text("utf-8")
    assert [name for name in programs if f"| `{name}" not in text] == []


def test_batch_file(tmp_path):
    """PY-8: answers in order, one that cannot be served among them, and the shared beginning is skipped."""
    shared = "The import statement finds a module, loads it and binds its name in the local namespace. "
    lines = [{"text": shared + "When"}, {"token_ids": [5] * 5000}, {"text": shared + "Packages"}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    params = RequestParams(num_tokens_to_generate=6)
    with load_engine(**SMALL) as engine:
        share = batch_file.answer_file(engine, tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", params)
        alone = engine.generate([shared + "When", shared + "Packages"], params)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answers[0]["answer"], answers[2]["answer"]] == [record.generated_text for record in alone]
    assert answers[1]["answer"] is None
    assert "cannot be served" in answers[1]["error"]
    assert share > 0


def test_streaming(capsys):
    """PY-8: the printed parts form the answer; the abandoned request owns nothing any more."""
    with load_engine(**SMALL) as engine:
        *answers, sentence = asyncio.run(streaming.answer_all(engine))
        assert engine.statistics().use.blocks_in_use == 0
        params = RequestParams(num_tokens_to_generate=24, temperature=0.7, top_p=0.9, seed=1)
        assert answers == [record.generated_text for record in engine.generate(streaming.QUESTIONS, params)]
    assert sentence == "Return a list of the same as for the given object"
    assert len(capsys.readouterr().out.splitlines()) > 3


def steps_of(*flags: str) -> rl_loop.Progress:
    return rl_loop.main(["--prompts", "2", "--group-size", "4", "--epochs", "1", *flags])


class TestReinforcementLearning:
    """PY-8, RL-12: at each step the engine's log-probs are those of the trainer's own forward."""

    def test_the_loop(self):
        progress = steps_of("--steps", "2")
        assert max(progress.differences) < rl_loop.TOLERANCE
        for samples in progress.samples:
            computed = [one.prompt_length - one.skipped for one in samples]
            assert computed[0] == samples[0].prompt_length
            assert 0 < computed[4] < samples[4].prompt_length, "the second prompt has the first one's beginning"
            assert computed[1:4] == computed[5:] == [0] * 3, "a group's prompt is computed once"
        assert rl_loop.skipped_share(progress.samples[0]) > 3 / 4


class TestGolden:
    """PY-8: a golden test passes today, and fails when something has changed."""

    def test_it_passes(self):
        golden.test_outputs_are_the_golden_ones()

    @pytest.mark.parametrize("field", ["tokens", "text", "finish_reason", "log_probs"])
    def test_it_can_fail(self, field):
        pinned = json.loads(golden.GOLDEN.read_text("utf-8"))
        changed = copy.deepcopy(pinned)
        value = changed["list"][field]
        changed["list"][field] = f"{value}." if isinstance(value, str) else [value[0] + 1, *value[1:]]
        golden.compare(pinned, pinned)
        with pytest.raises(AssertionError, match=f"list: {field}"):
            golden.compare(changed, pinned)


def test_convert(tmp_path, capsys):
    """PY-8: there and back, bit for bit."""
    source, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    oracles.make("llama", source)
    write_tokenizer(source, 101)
    convert.main(["to-megatron", str(source), str(megatron)])
    convert.main(["to-huggingface", str(megatron), str(back), "--like", str(source)])
    old, new = (load_file(directory / "model.safetensors") for directory in (source, back))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert f"{back} is written" in capsys.readouterr().out


def test_with_torchrun(monkeypatch, capsys):
    """PY-8: the example runs under torchrun, beside a torch.distributed that it leaves alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    answers = with_torchrun.main()
    assert capsys.readouterr().out == "rank 0 of 1: 3 answers\n"
    with load_engine(**SMALL) as engine:
        records = engine.generate(with_torchrun.PROMPTS, RequestParams(num_tokens_to_generate=8))
    assert answers == [record.generated_text for record in records]
    assert torch.distributed.is_initialized()
