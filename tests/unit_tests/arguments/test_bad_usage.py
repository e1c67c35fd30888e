"""Errors of the command line are reported in one line, with both flags where two contradict each other."""

from __future__ import annotations

import pytest

from arguments import parse_arguments

NGRAM = "--speculative-method ngram --num-speculative-tokens 3"
MOE = "--hybrid-override-pattern M*E --num-experts 4"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--load a --load-hf b", ("--load ", "--load-hf ")),
        ("--bf16 --fp16", ("--bf16", "--fp16")),
        ("--bf16 --dtype float16", ("--bf16", "--dtype float16")),
        ("--dry-run --tensor-model-parallel-size 2", ("--dry-run plans a single rank", "need 2; leave them out")),
        ("--swiglu --squared-relu", ("--swiglu", "--squared-relu")),
        ("--prompts a --prompt-file b", ("--prompts", "--prompt-file")),
        (
            "--inference-dynamic-batching-buffer-size-gb 1 --inference-dynamic-batching-block-count 9",
            ("--inference-dynamic-batching-buffer-size-gb 1", "--inference-dynamic-batching-block-count 9"),
        ),
        (
            "--inference-dynamic-batching-max-tokens 8 --inference-dynamic-batching-max-requests 9",
            ("--inference-dynamic-batching-max-tokens 8", "--inference-dynamic-batching-max-requests 9"),
        ),
        ("--drain-between-batches", ("--drain-between-batches", "--batch-boundaries")),
        ("--batch-boundaries 0,2", ("--drain-between-batches", "--batch-boundaries")),
        ("--output-request-events", ("--output-request-events", "--output-path")),
        ("--top-n-logprobs 3", ("top_n_logprobs 3", "return_log_probs")),
        ("--speculative-method ngram", ("--speculative-method ngram", "--num-speculative-tokens")),
        ("--speculative-draft-cost 0.1", ("--speculative-draft-cost", "--speculative-method")),
        (
            "--speculative-method ngram --num-speculative-tokens 3 --no-speculative-adaptive "
            "--speculative-draft-cost 0.1",
            ("--speculative-draft-cost", "--speculative-adaptive"),
        ),
        (
            "--prefix-cache-compare --no-inference-dynamic-batching-enable-prefix-caching",
            ("--prefix-cache-compare", "--no-inference-dynamic-batching-enable-prefix-caching"),
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
        ("--no-such-flag", "--no-such-flag"),
        ("--hidden", "--hidden"),  # no abbreviations
        ("--hidden-size", "expected one argument"),
        ("--hidden-size wide", "'wide' is not a whole number"),
        ("--temperature hot", "'hot' is not a number"),
        (
            "--hybrid-override-pattern MXM",
            "unknown letter 'X'; known are M (recurrent), * (attention), - (MLP), E (MoE)",
        ),
        ("--num-attention-heads 0", "--num-attention-heads 0 must be positive"),
        (f"{NGRAM} --num-speculative-tokens 65", "--num-speculative-tokens 65 must be between 0 (off) and 64"),
        (f"{NGRAM} --speculative-ngram-longest 1", "--speculative-ngram-longest 1 must be between 1 and 64"),
        (f"{NGRAM} --speculative-draft-cost -1", "--speculative-draft-cost -1.0 must be zero or more"),
        (f"{NGRAM} --speculative-draft-cost nan", "--speculative-draft-cost nan must be zero or more"),
        ("--hidden-size 250 --num-attention-heads 4", "250 is not a multiple of 4"),
        ("--mamba-num-heads 6 --mamba-num-groups 4", "--mamba-num-groups"),
        ("--hybrid-override-pattern ME", "pattern 'ME' has MoE layers (E), which need --num-experts"),
        ("--num-experts 4", "--num-experts 4 is for MoE layers, and pattern 'M-M*M-M-' has none"),
        (f"{MOE} --num-experts 0", "--num-experts 0 must be positive"),
        (f"{MOE} --moe-router-topk 5", "--moe-router-topk 5 experts of --num-experts 4 cannot be chosen"),
        (f"{MOE} --moe-router-topk 1", "--moe-router-topk 1 gives every expert the softmax weight 1"),
        (f"{MOE} --moe-router-enable-expert-bias", "--moe-router-enable-expert-bias needs sigmoid"),
        (f"{MOE} --moe-latent-size 8 --no-disable-bias-linear", "leave --no-disable-bias-linear out"),
        (f"{MOE} --moe-router-topk-scaling-factor 0", "--moe-router-topk-scaling-factor 0.0 must be more than 0"),
        (f"{MOE} --moe-router-topk-scaling-factor nan", "must be more than 0"),
        (f"{MOE} --moe-router-score-function tanh", "sigmoid"),
        (f"{MOE} --moe-router-num-groups 2", "--moe-router-group-topk None: give both or neither"),
        (f"{MOE} --moe-router-group-topk 2", "--moe-router-num-groups None and --moe-router-group-topk 2: give both"),
        (f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1", "3 groups cannot share 4 experts evenly"),
        (f"{MOE} --moe-router-num-groups 2 --moe-router-group-topk 3", "at most 2 groups can be open"),
        (f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 1", "at most 1 experts to a token"),
        ("--position-embedding-type alibi", "rope"),
        ("--rotary-percent 1.5", "--rotary-percent 1.5 must be more than 0, and at most 1"),
        ("--rotary-percent 0", "--rotary-percent 0.0 must be more than 0"),
        ("--position-embedding-type rope --kv-channels 7", "an attention head of 7 rotates 7 channels"),
        ("--position-embedding-type rope --kv-channels 8 --rotary-percent 0.1", "head of 8 rotates 0 channels"),
        ("--rotary-base 0", "--rotary-base 0 must be positive"),
        ("--norm-epsilon 0", "--norm-epsilon 0.0 must be more than 0"),
        ("--norm-epsilon nan", "--norm-epsilon nan must be more than 0"),
        ("--temperature -1", "temperature -1.0 must be zero"),
        ("--top_p 1.5", "between 0 (off) and 1"),
        ("--top_p nan", "between 0 (off) and 1"),
        ("--num-tokens-to-generate -1", "zero"),
        ("--logit-bias {1:2}", "an object of token ids and numbers"),
        ("--stop-token-ids 1,x", "whole numbers separated by commas"),
        ("--inference-repeat-n 0", "--inference-repeat-n 0"),
        ("--incoming-requests-per-sec nan", "--incoming-requests-per-sec nan must be a number"),
        ("--num-tokens-from-file", "--num-tokens-from-file needs --prompt-file"),
        ("--drain-between-batches --batch-boundaries 4,2", "4,2 must be increasing"),
        ("--drain-between-batches --batch-boundaries 1,x", "'1,x' is not a list of whole numbers"),
        ("--inference-dynamic-batching-block-size 0", "-block-size 0 must be between 1 and"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0 must be between 1 and"),
    ],
)
def test_bad_values(one_line_error, argv, expected):
    assert expected in one_line_error(*argv.split())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--top-k 5", "unrecognized arguments: --top-k 5; did you mean --top_k?"),
        ("--top-p=0.5", "did you mean --top_p?"),
        ("--num_layers 3", "did you mean --num-layers?"),
        ("--Seed 3", "did you mean --seed?"),
        ("-seed 3", "did you mean --seed?"),
        ("--hiden-size 8", "did you mean --hidden-size?"),
        ("--max-requests 8", "did you mean --inference-dynamic-batching-max-requests?"),
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


@pytest.mark.parametrize("rate", ["0", "-1", "-0.5"])
@pytest.mark.parametrize(
    "other", ["", "--incoming-requests-per-step 2", "--drain-between-batches --batch-boundaries 0"], ids=str
)
def test_no_rate_is_all_at_once(rate, other):
    """A rate of zero submits all requests at once, as in Megatron, and does not contradict other ways to submit."""
    run = parse_arguments(["--incoming-requests-per-sec", rate, *other.split()]).run
    assert run.arrival_rate is None
    assert run.incoming_requests_per_step == (2 if "step" in other else None)
