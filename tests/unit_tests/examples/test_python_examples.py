"""PY-8: the programs of `examples/python/` work as described."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from examples.python import batch_file, convert, rl_loop, streaming, with_torchrun
from examples.python.golden import test_outputs as golden
from megatron_ext import RequestParams, load_engine
from megatron_ext.config import SourceConfig
from megatron_ext.models.load import load_model
from tests.unit_tests.models.huggingface import llama_oracle
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
    assert sentence == "Return a list of (name, value) tuples"
    assert len(capsys.readouterr().out.splitlines()) > 3


@pytest.fixture
def policy() -> nn.Module:
    return load_model(SourceConfig(), {}).model.train()


class TestReinforcementLearning:
    """PY-8: eight samples from one prefill, new weights in place, and the same as a fresh engine."""

    def test_the_loop(self, policy):
        old = copy.deepcopy(dict(policy.named_parameters()))
        with rl_loop.load() as engine:
            groups = rl_loop.run(engine, policy, rounds=2)
            after = rl_loop.sample(engine, seed=0)
        for group in (*groups, after):
            skipped = [record.skipped_prefill_token_count for record in group.records]
            length = group.records[0].prompt_token_count
            assert skipped == [0] + [length] * 7  # one computes, seven take that over, in each round anew
            assert group.skip_rate == pytest.approx(7 / 8)
            assert group.skip_rate > 0.8
        assert any(not torch.equal(old[name], new) for name, new in policy.named_parameters())
        assert self.tokens(groups[0]) != self.tokens(after)  # the same seeds, other weights

        with rl_loop.load() as fresh:
            assert self.tokens(rl_loop.sample(fresh, seed=0)) == self.tokens(groups[0])  # the control
            fresh.update_weights(policy.named_parameters())
            assert self.tokens(rl_loop.sample(fresh, seed=0)) == self.tokens(after)

    @staticmethod
    def tokens(group: rl_loop.Round) -> list[tuple[int, ...]]:
        return [record.generated_tokens for record in group.records]

    def test_log_probs_are_the_engines(self, policy):
        """The policy gives each sampled answer the log-prob that the engine reports."""
        params = RequestParams(num_tokens_to_generate=8, return_log_probs=True, skip_prompt_log_probs=True)
        with rl_loop.load() as engine:
            engine.update_weights(policy.named_parameters())
            (record,) = engine.generate(rl_loop.PROMPT, params)
        tokens = torch.tensor([*record.prompt_tokens, *record.generated_tokens])
        with torch.no_grad():
            found = rl_loop.log_prob(policy, tokens, record.prompt_token_count)
        assert found.item() == pytest.approx(sum(record.generated_log_probs), abs=1e-3)


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
    llama_oracle.make(llama_oracle.SHAPES[0], source)
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
