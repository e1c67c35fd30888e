"""Prompts from flags, files and standard input: fields of a line, and errors of a bad one."""

from __future__ import annotations

import io
import json
import sys

import pytest

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.errors import ConfigError
from megatron_ext.offline.prompts import (
    Prompt,
    example_prompts,
    parse_lines,
    read_prompts,
    tokenize_prompts,
)
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.tokenizer import NullTokenizer

DEFAULTS = RequestParams(num_tokens_to_generate=7, temperature=0.5)


def parse(*lines: str | bytes | dict, **rules: bool) -> list[Prompt]:
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    return parse_lines(
        [line if isinstance(line, bytes) else line.encode() for line in encoded],
        "prompts.jsonl",
        RunConfig(prompt_file="prompts.jsonl", **rules),
        DEFAULTS,
    )


def test_a_line_decides_over_the_flags():
    (prompt,) = parse({"text": "Hello", "num_tokens_to_generate": 3})
    assert prompt.content == "Hello"
    assert prompt.params == RequestParams(num_tokens_to_generate=3, temperature=0.5)
    assert prompt.source == "prompts.jsonl, line 1"


def test_every_field_of_a_line():
    fields = {
        "num_tokens_to_generate": 5,
        "temperature": 1,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": 3},
        "bad_words": ["c"],
        "seed": 11,
        "stop_words": ["a", "b"],
        "stop_token_ids": [5],
        "termination_id": 2,
        "ignore_eos": True,
        "return_log_probs": True,
        "skip_prompt_log_probs": True,
        "top_n_logprobs": 3,
        "cache_salt": "tenant",
        "enable_prefix_caching": False,
        "cache_checkpoint": [1, 2],
    }
    (prompt,) = parse({"token_ids": [1, 2], **fields})
    assert prompt.content == (1, 2)
    assert prompt.params == RequestParams(**fields)
    assert prompt.params.logit_bias == ((7, 3.0),)
    assert prompt.params.stop_words == ("a", "b")
    assert prompt.params.cache_checkpoint == (1, 2)


def test_byte_order_mark_is_passed_over():
    (prompt,) = parse(b"\xef\xbb\xbf" + b'{"text": "a"}')
    assert prompt.content == "a"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"', "not JSON: Expecting ',' delimiter"),
        ('["a"]', "not a JSON object"),
        (b'{"text": "\xff"}', "not a text in UTF-8"),
        ("{}", "has neither text nor token_ids"),
        ('{"text": "a", "token_ids": [1]}', "has both text and token_ids"),
        ('{"text": ""}', 'text "" is not a text of at least one character'),
        (r'{"text": "a \ud800 b"}', "has half of a surrogate pair"),
        ('{"token_ids": []}', "token_ids [] is not a list of at least one whole number"),
        ('{"token_ids": [1, -2]}', "token_ids [1, -2] is not a list"),
        ('{"token_ids": [1.5]}', "token_ids [1.5] is not a list"),
        ('{"text": "a", "max_tokens": 3}', "unknown field 'max_tokens'; known are text, token_ids, num_tokens"),
        ('{"text": "a", "text": "b"}', "field 'text' is given twice"),
        ('{"text": "a", "temperature": "hot"}', 'temperature "hot" is not a number'),
        ('{"text": "a", "temperature": NaN}', "temperature nan must be zero"),
        ('{"text": "a", "top_k": 2.0}', "top_k 2.0 is not a whole number"),
        ('{"text": "a", "temperature": 1' + "0" * 400 + "}", "is not a number"),
        ('{"text": "a", "ignore_eos": 1}', "ignore_eos 1 is not true or false"),
        ('{"text": "a", "stop_words": "."}', 'stop_words "." is not a list of texts'),
        ('{"text": "a", "num_tokens_to_generate": -1}', "num_tokens_to_generate -1 must be zero"),
        ('{"text": "a", "top_n_logprobs": 2}', "top_n_logprobs 2 needs return_log_probs"),
        ('{"text": "a", "skip_prompt_log_probs": true}', "skip_prompt_log_probs needs return_log_probs"),
    ],
)
def test_a_bad_line_is_told_with_its_number(line, reason):
    with pytest.raises(ConfigError) as caught:
        parse({"text": "fine"}, line, {"text": "fine too"})
    message = str(caught.value)
    assert message.startswith("prompts.jsonl, line 2: ")
    assert reason in message
    assert "\n" not in message


def test_unknown_fields_can_be_passed_over(caplog):
    """The error names the flag; with it, what was passed over is told once for the file."""
    lines = ({"text": "a", "source": "x", "id": 1}, {"text": "b", "source": "y"})
    with pytest.raises(
        ConfigError, match=r"line 1: unknown field 'id'; .*; --ignore-unknown-prompt-fields ignores others"
    ):
        parse(*lines)
    prompts = parse(*lines, ignore_unknown_prompt_fields=True)
    assert [prompt.content for prompt in prompts] == ["a", "b"]
    assert [prompt.params for prompt in prompts] == [DEFAULTS] * 2
    (message,) = caplog.messages
    assert message.endswith("are ignored; lines with each: 'source' (2), 'id' (1)")
    with pytest.raises(ConfigError, match="temperature"):
        parse({"text": "a", "source": 1, "temperature": "hot"}, ignore_unknown_prompt_fields=True)


class TestMegatronsLength:
    """`chatgpt_output_token_length`: known, and as in Megatron's scripts heeded with --num-tokens-from-file only."""

    def test_without_the_flag(self):
        (prompt,) = parse({"text": "a", "chatgpt_output_token_length": 0})
        assert prompt.params == DEFAULTS

    def test_with_the_flag(self):
        prompts = parse({"text": "a", "chatgpt_output_token_length": 12}, num_tokens_from_file=True)
        assert [prompt.params.num_tokens_to_generate for prompt in prompts] == [12]

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({}, "--num-tokens-from-file needs chatgpt_output_token_length, which this line lacks"),
            ({"chatgpt_output_token_length": 0}, "chatgpt_output_token_length 0 must be at least 1"),
            ({"chatgpt_output_token_length": 9, "num_tokens_to_generate": 9}, "give one of them"),
        ],
        ids=str,
    )
    def test_refuses_invalid_fields(self, fields, reason):
        with pytest.raises(ConfigError, match=reason):
            parse({"text": "a"} | fields, num_tokens_from_file=True)


def test_prompts_from_flags():
    prompts = read_prompts(RunConfig(prompts=("a", "b")), DEFAULTS)
    assert prompts == [Prompt("a", DEFAULTS, "--prompts, prompt 1"), Prompt("b", DEFAULTS, "--prompts, prompt 2")]


def test_an_empty_prompt_from_a_flag():
    """KV-12: a clear error."""
    with pytest.raises(ConfigError, match="--prompts, prompt 2 is empty"):
        read_prompts(RunConfig(prompts=("a", "")), DEFAULTS)


def test_a_flag_in_another_encoding():
    with pytest.raises(ConfigError, match=r"--prompts, prompt 1: .* is not a text in UTF-8"):
        read_prompts(RunConfig(prompts=(b"gr\xf6sser".decode(errors="surrogateescape"),)), DEFAULTS)


def test_prompts_from_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"token_ids": [5]}\n')))
    (prompt,) = read_prompts(RunConfig(prompt_file="-"), DEFAULTS)
    assert prompt == Prompt((5,), DEFAULTS, "standard input, line 1")


def test_shipped_prompts_share_prefixes():
    """A long system prompt with several questions, and conversations whose turns repeat the previous ones."""
    texts = [prompt.content for prompt in read_prompts(RunConfig(), DEFAULTS)]
    assert texts == [prompt.content for prompt in example_prompts(DEFAULTS)]
    system, _, _ = texts[0].partition("<|end|>")
    assert len(system) > 1500
    assert sum(text.startswith(system) for text in texts) >= 4
    continued = [later for earlier in texts for later in texts if later != earlier and later.startswith(earlier)]
    assert len(continued) >= 4


class TestTokenizePrompts:
    def check(self, *contents: str | tuple[int, ...]) -> None:
        prompts = [Prompt(content, DEFAULTS, f"line {i}") for i, content in enumerate(contents, start=1)]
        tokenize_prompts(prompts, NullTokenizer(100), vocab_size=100)

    def test_texts_and_ids(self):
        prompts = [Prompt(content, DEFAULTS, "here") for content in ((0, 99), "1  2 3")]
        assert tokenize_prompts(prompts, NullTokenizer(100), vocab_size=100) == [
            RequestInputs((0, 99), DEFAULTS),
            RequestInputs((1, 2, 3), DEFAULTS, "1  2 3"),
        ]

    def test_an_id_outside_the_vocabulary(self):
        with pytest.raises(
            ConfigError, match=r"^line 2: token id 100 is not in the vocabulary of 100; ids go from 0 to 99$"
        ):
            self.check((0,), (1, 100))

    def test_a_text_that_is_no_list_of_ids(self):
        with pytest.raises(ConfigError, match=r"^line 1: 'Hello' is not a token id"):
            self.check("Hello")

    def test_a_text_without_tokens(self):
        with pytest.raises(ConfigError, match=r'^line 1: the tokenizer returns no token for " "$'):
            self.check(" ")


# MF-7: prompts that are made up, and the first prompts of a file


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
    one = tokenize_prompts(read_prompts(run, DEFAULTS, seed=4), NullTokenizer(50), 64)
    assert one[0].prompt_tokens[:3] != one[1].prompt_tokens[:3]


def test_gaps_of_a_vocabulary_are_left_out():
    class Gaps(NullTokenizer):
        def __init__(self) -> None:
            super().__init__(50)
            self.token_ids = frozenset((3, 7, 70))

    run = RunConfig(num_tokens_to_prompt=(30, 30), incoming_requests_per_sec=0.1)
    (prompt,) = tokenize_prompts(read_prompts(run, DEFAULTS), Gaps(), 64)
    assert set(prompt.prompt_tokens) == {3, 7}


def test_the_first_prompts_of_a_file(tmp_path):
    """MF-7: lines after them are not read."""
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"text": f"prompt {i}"}) + "\n\n" for i in range(3)) + "{broken\n")
    for asked in (1, 3):
        run = RunConfig(prompt_file=str(file), prompt_file_num_truncate=asked)
        assert [one.content for one in read_prompts(run, DEFAULTS)] == [f"prompt {i}" for i in range(asked)]
    with pytest.raises(ConfigError, match="line 7: not JSON"):
        read_prompts(RunConfig(prompt_file=str(file), prompt_file_num_truncate=9), DEFAULTS)
