"""MF-12: scripts with Megatron's names run to their ends; `checkout` has the stand-in of `megatron.training`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.unit_tests.megatron_lm.conftest import PROMPTS
from tests.unit_tests.support import megatron_models

IS_NEW = importlib.util.find_spec("megatron.core.inference.config") is not None
NEW = ("--with-inference-config", "--null-library", "null-text", "--inference-dynamic-batching-prefix-caching")
FORMS = {"0.16.1": ("--null-library", "null-text") if IS_NEW else (), **({"0.19": NEW} if IS_NEW else {})}
TOKENS = [[int(token) for token in prompt.split()] for prompt in PROMPTS]
SIZE = ("--vocab-size", "56" if IS_NEW else "55")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[list[int], list[float]]]]:
    """Greedy tokens and log-probs by the models' own forwards."""
    with megatron_models.stand_ins():
        models = {kind: megatron_models.build(kind) for kind in ("llama", "hybrid")}
        return {
            kind: [megatron_models.generate(model, tokens, 6) for tokens in TOKENS] for kind, model in models.items()
        }


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.parametrize("form", FORMS)
def test_parts_by_hand(run_script, expected, form, kind):
    """Tokens and log-probs are those of the model's own forward."""
    provider = "mamba" if kind == "hybrid" else "gpt"
    flags = ("--model-provider", provider, "--termination-id", "99", *SIZE, *FORMS[form])
    results = run_script("gpt/by_hand.py", kind, *flags)
    requests = results["requests"]
    assert [one["tokens"] for one in requests] == [tokens for tokens, _ in expected[kind]]
    for one, tokens, (_, scores) in zip(requests, TOKENS, expected[kind], strict=True):
        assert one["prompt_tokens"] == tokens
        assert len(one["log_probs"]) == len(tokens) - 1 + 6
        assert one["log_probs"][-6:] == pytest.approx(scores, abs=megatron_models.ATOL)
        assert [max(top.values()) for top in one["top_n"]] == pytest.approx(scores, abs=megatron_models.ATOL)
        assert len(one["prompt_top_n"]) == len(tokens) - 1
        assert (one["status"], one["top_k"]) == ("COMPLETED", 1)
        assert one["text"] == " ".join(map(str, one["tokens"]))
    assert [one["prompt"] for one in requests] == PROMPTS
    assert results["decode_only"] == [False, False, *[True] * 5]
    assert results["steps"] == 7
    assert results["max_tokens"] == [256, 256]
    assert results["max_requests"] == 8
    assert results["blocks"] > 8
    assert results["is_subclass"]
    assert results["capture_stats"] is None


def test_a_suspended_engine_continues(run_script, expected):
    flags = ("--termination-id", "99", "--suspend-after", "3", *SIZE, *FORMS["0.16.1"])
    results = run_script("gpt/by_hand.py", "llama", *flags)
    assert [one["tokens"] for one in results["requests"]] == [tokens for tokens, _ in expected["llama"]]
    assert results["prefill_tokens"] > sum(map(len, TOKENS)), "computed again"


def test_prompts_skip_what_is_cached(run_script, expected):
    """The second prompt of a hybrid shares a block of 16 tokens and its states with the first."""
    flags = ("--model-provider", "mamba", "--termination-id", "99", "--skip-prompt-log-probs", *SIZE)
    results = run_script("gpt/by_hand.py", "hybrid", *flags, *list(FORMS.values())[-1])
    assert [one["tokens"] for one in results["requests"]] == [tokens for tokens, _ in expected["hybrid"]]
    assert results["prefill_tokens"] == sum(map(len, TOKENS)) - 16


def test_the_high_level_interface(run_script, expected):
    results = run_script("offline.py")
    assert results == {"tokens": [tokens for tokens, _ in expected["llama"]], "steps": 6}
