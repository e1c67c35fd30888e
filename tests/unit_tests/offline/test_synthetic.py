"""MF-7: prompts that are made up, and the first prompts of a file."""

from __future__ import annotations

import json

import pytest

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.offline.prompts import read_prompts, tokenize_prompts
from megatron_ext.text.tokenizer import NullTokenizer

DEFAULTS = RequestParams(num_tokens_to_generate=7)


def lengths(run: RunConfig, seed: int = 1) -> list[int]:
    prompts = read_prompts(run, DEFAULTS, seed=seed)
    tokenized = tokenize_prompts(prompts, NullTokenizer(50), 64)
    assert all(set(one.prompt_tokens) <= set(range(50)) for one in tokenized)
    assert all(one.prompt_text is None and one.params == DEFAULTS for one in tokenized)
    return [len(one.prompt_tokens) for one in tokenized]


def test_as_many_as_come_in_their_time():
    """Rate times duration, which is ten seconds unless it is said; lengths within what is asked for."""
    run = RunConfig(num_tokens_to_prompt=(3, 9), incoming_requests_per_sec=2.5)
    assert len(lengths(run)) == 25
    assert set(lengths(run)) <= set(range(3, 10))
    assert len(set(lengths(run))) > 3
    longer = RunConfig(incoming_requests_duration=2.0, incoming_requests_per_sec=8.0)
    assert len(lengths(longer)) == 16
    assert all(64 <= length <= 1024 for length in lengths(longer))


def test_the_seed_decides():
    run = RunConfig(num_tokens_to_prompt=(3, 900), incoming_requests_per_sec=1.0)
    assert lengths(run, 1) == lengths(run, 1) != lengths(run, 2)
    one, other = (tokenize_prompts(read_prompts(run, DEFAULTS, seed=4), NullTokenizer(50), 64) for _ in range(2))
    assert one == other
    assert one[0].prompt_tokens[:3] != one[1].prompt_tokens[:3]


def test_gaps_of_a_vocabulary_are_left_out():
    class Gaps(NullTokenizer):
        def __init__(self) -> None:
            super().__init__(50)
            self.token_ids = frozenset((3, 7, 70))

    run = RunConfig(num_tokens_to_prompt=(30, 30), incoming_requests_per_sec=0.1)
    (prompt,) = tokenize_prompts(read_prompts(run, DEFAULTS), Gaps(), 64)
    assert set(prompt.prompt_tokens) == {3, 7}


def write(path, count: int) -> str:
    path.write_text("".join(json.dumps({"text": f"prompt {i}"}) + "\n\n" for i in range(count)))
    return str(path)


def test_the_first_prompts_of_a_file(tmp_path):
    file = write(tmp_path / "p.jsonl", 5)
    for asked, expected in ((None, 5), (3, 3), (9, 5)):
        run = RunConfig(prompt_file=file, prompt_file_num_truncate=asked)
        assert [one.content for one in read_prompts(run, DEFAULTS)] == [f"prompt {i}" for i in range(expected)]


def test_later_lines_are_not_read(tmp_path):
    file = write(tmp_path / "p.jsonl", 2)
    with open(file, "a") as lines:
        lines.write("{broken\n")
    assert len(read_prompts(RunConfig(prompt_file=file, prompt_file_num_truncate=2), DEFAULTS)) == 2
    with pytest.raises(ConfigError, match="line 5: not JSON"):
        read_prompts(RunConfig(prompt_file=file, prompt_file_num_truncate=3), DEFAULTS)
