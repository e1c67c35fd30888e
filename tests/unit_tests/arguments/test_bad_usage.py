"""Errors of the command line are reported in one line, with both flags where two contradict each other."""

from __future__ import annotations

import pytest

NGRAM = "--speculative-method ngram --num-speculative-tokens 3"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--load a --load-hf b", ("--load ", "--load-hf ")),
        ("--dry-run --tensor-model-parallel-size 2", ("--dry-run plans a single rank", "need 2; leave them out")),
        (
            "--inference-dynamic-batching-buffer-size-gb 1 --inference-dynamic-batching-block-count 9",
            ("--inference-dynamic-batching-buffer-size-gb 1", "--inference-dynamic-batching-block-count 9"),
        ),
        ("--top-n-logprobs 3", ("top_n_logprobs 3", "return_log_probs")),
        ("--speculative-method ngram", ("--speculative-method ngram", "--num-speculative-tokens")),
        ("--speculative-draft-cost 0.1", ("--speculative-draft-cost", "--speculative-method")),
        (
            "--speculative-method ngram --num-speculative-tokens 3 --no-speculative-adaptive "
            "--speculative-draft-cost 0.1",
            ("--speculative-draft-cost", "--speculative-adaptive"),
        ),
    ],
)
def test_contradictions_name_both_sides(one_line_error, argv, expected):
    message = one_line_error(*argv.split())
    for part in expected:
        assert part in message


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--hidden", "--hidden"),  # no abbreviations
        ("--hidden-size", "expected one argument"),
        ("--hidden-size wide", "'wide' is not a whole number"),
        (f"{NGRAM} --num-speculative-tokens 65", "--num-speculative-tokens 65 must be between 0 (off) and 64"),
        ("--temperature -1", "temperature -1.0 must be zero"),
        ("--stop-token-ids 1,x", "whole numbers separated by commas"),
        ("--drain-between-batches --batch-boundaries 1,x", "'1,x' is not a list of whole numbers"),
    ],
)
def test_bad_values(one_line_error, argv, expected):
    assert expected in one_line_error(*argv.split())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--top-k 5", "unrecognized arguments: --top-k 5; did you mean --top_k?"),
        ("--num_layers 3", "did you mean --num-layers?"),
        ("--Seed 3", "did you mean --seed?"),
        ("--hiden-size 8", "did you mean --hidden-size?"),
        ("--top-k 5 --top-p 1", "did you mean --top_k for --top-k, --top_p for --top-p?"),
    ],
)
def test_a_near_miss_is_answered_with_the_flag(one_line_error, argv, expected):
    assert one_line_error(*argv.split()).endswith(expected)


@pytest.mark.parametrize("argv", ["--zzz", "surplus", "--" + "top-k" * 10_000])
def test_unlike_flags_get_no_suggestion(one_line_error, argv):
    message = one_line_error(argv)
    assert "did you mean" not in message
    assert len(message) < 300
