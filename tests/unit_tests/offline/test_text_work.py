"""Unneeded text work is not done: prompts are tokenized once, and only shown ids are detokenized."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_ext.commands.run import DONE, main
from megatron_ext.offline.results import PromptTexts
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.offline.conftest import make_record
from tests.unit_tests.offline.test_prefix_caching_runs import ATTENTION_ONLY

TEXTS = ("5 9  13 2 40 41 42 7", "5 9 13 2 40 41 42 8")  # two spaces: as submitted, not as read back
IDS = ((5, 9, 13, 2, 40, 41, 42, 7), (5, 9, 13, 2, 40, 41, 42, 8))


@pytest.fixture
def tokenized(monkeypatch) -> Counter[str]:
    """Count how often each text is tokenized."""
    counts, tokenize = Counter(), NullTokenizer.tokenize

    def counting(tokenizer: NullTokenizer, text: str) -> list[int]:
        counts[text] += 1
        return tokenize(tokenizer, text)

    monkeypatch.setattr(NullTokenizer, "tokenize", counting)
    return counts


@pytest.fixture
def detokenized(monkeypatch) -> Counter[tuple[int, ...]]:
    """Count how often each list of tokens is detokenized."""
    counts, detokenize = Counter(), NullTokenizer.detokenize

    def counting(tokenizer: NullTokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        counts[tuple(ids)] += 1
        return detokenize(tokenizer, ids, skip_special_tokens)

    monkeypatch.setattr(NullTokenizer, "detokenize", counting)
    return counts


def run(folder: Path, lines: list[dict], *flags: str) -> None:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([*ATTENTION_ONLY, "--prompt-file", str(path), *flags]) == DONE


@pytest.mark.parametrize("flags", [(), ("--inference-repeat-n", "3")])
def test_a_prompt_is_tokenized_once(tmp_path, tokenized, detokenized, flags):
    """However often it runs; the JSON has the text that was submitted, and nothing is read back for it."""
    output = tmp_path / "out.json"
    results = ("--output-path", str(output), "--output-format", "full")
    batches = ("--drain-between-batches", "--batch-boundaries", "0,1")
    run(tmp_path, [{"text": text} for text in TEXTS], *results, *batches, *flags)
    assert tokenized == Counter(TEXTS)
    results = json.loads(output.read_text())
    passes = 3 if "--inference-repeat-n" in flags else 1
    assert [results[str(i)]["input_prompt"] for i in range(2 * passes)] == [*TEXTS] * passes
    assert not detokenized.keys() & set(IDS)


def test_ids_are_read_once_for_the_json(tmp_path, detokenized):
    """The lines of ended requests, the table, and every repetition reuse the texts."""
    output = tmp_path / "out.json"
    flags = ("--output-path", str(output), "--output-format", "full", "--inference-repeat-n", "2")
    run(tmp_path, [{"token_ids": ids} for ids in IDS], *flags)
    results = json.loads(output.read_text())
    assert [results[str(i)]["input_prompt"] for i in range(4)] == [" ".join(map(str, ids)) for ids in IDS] * 2
    assert [detokenized[ids] for ids in IDS] == [1, 1]


def test_a_prompt_that_cannot_be_read(caplog):
    """Answers are not lost for it: the text is null, and a warning says why, once."""
    texts = PromptTexts(lambda ids: {}[ids[0]])
    assert [texts(make_record(7, prompt_text=None)) for _ in range(2)] == [None, None]
    assert caplog.messages == ["the prompt of request 7 has no text: 1"]
    assert texts(make_record(7)) == "1 2 3"
