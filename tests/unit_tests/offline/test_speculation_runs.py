"""Drafts as a user of the command `run` meets them: prompt lines, JSON (SP-1, SP-7)."""

from __future__ import annotations

import json

import pytest

from megatron_ext.commands.run import DONE, main

TINY = """
--hybrid-override-pattern M*- --hidden-size 32 --num-attention-heads 2 --mamba-head-dim 16 --mamba-state-dim 16
--mamba-num-groups 1 --tokenizer-type NullTokenizer --vocab-size 64 --num-tokens-to-generate 12
--inference-dynamic-batching-block-count 32 --inference-dynamic-batching-block-size 16
--inference-dynamic-batching-max-requests 4
""".split()
NGRAM = "--speculative-method ngram --num-speculative-tokens 3 --no-speculative-adaptive".split()
PROMPT = [5, 6, 7, 8] * 4


@pytest.fixture
def run(tmp_path, capfd):
    def run_lines(*flags: str, expected: int = DONE, **fields: object) -> dict | str:
        prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.json"
        results = ("--output-path", str(output), "--output-format", "full")
        prompts.write_text("".join(json.dumps({"token_ids": PROMPT} | one) + "\n" for one in ({}, fields)))
        assert main([*TINY, *flags, "--prompt-file", str(prompts), *results]) == expected
        return json.loads(output.read_text()) if expected == DONE else capfd.readouterr().err

    return run_lines


def test_the_json_counts_drafts_and_has_the_same_tokens(run):
    """SP-7: per request and in total; without speculation the JSON is as it was, with one null more."""
    plain, drafted = run(), run(*NGRAM, num_speculative_tokens=0)
    assert plain["speculation"] is None
    assert not {"draft_token_count", "accepted_token_count"} & set(plain["0"])
    assert not {"draft_states", "draft_layers"} & set(plain["geometry"])
    assert [drafted[key]["generated_tokens"] for key in "01"] == [plain[key]["generated_tokens"] for key in "01"]
    use = drafted["speculation"]
    assert use["draft_token_count"] == drafted["0"]["draft_token_count"] > 0
    assert use["accepted_token_count"] == drafted["0"]["accepted_token_count"]
    assert drafted["1"]["draft_token_count"] == 0
    assert sum(use["draft_tokens_by_position"]) == use["draft_token_count"]
    assert drafted["geometry"]["draft_states"] == 12


def test_a_line_that_asks_for_too_many_is_told_with_its_number(run):
    """SP-1: nothing runs."""
    error = run(*NGRAM, expected=2, num_speculative_tokens=4)
    assert "line 2: num_speculative_tokens 4 must be at most --num-speculative-tokens 3" in error
    error = run(expected=2, num_speculative_tokens=1)
    assert "line 2: num_speculative_tokens 1 must be 0 without --speculative-method" in error
