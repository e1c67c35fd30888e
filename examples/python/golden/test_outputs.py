"""A golden test of one's own: what a model gave when it was last looked at, it gives today.

    python -m pytest examples/python/golden          # compares with golden.json
    python -m examples.python.golden.test_outputs    # writes it anew; read the diff before you commit it

Tokens are compared exactly and log-probs within a tolerance, since another CPU rounds otherwise. Prompts whose best two
tokens are nearly equal make a test that fails for no reason: `margin` finds them. Times belong into no golden file.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ext import RequestParams, RequestRecord, load_engine

GOLDEN = Path(__file__).with_name("golden.json")
PROMPTS: dict[str, str | list[int]] = {
    "import": "The import statement",
    "list": "A list is",
    "ids": [665, 18, 838, 18],
    "import again": "The import statement",
}
PARAMS = RequestParams(num_tokens_to_generate=8, return_log_probs=True, skip_prompt_log_probs=True, top_n_logprobs=2)
TOLERANCE = 1e-3  # of log-probs in fp32
LEAST_MARGIN = 1e-2  # between the two best tokens


def outputs() -> dict[str, dict[str, object]]:
    """Return the model's present outputs by name of the prompt."""
    with load_engine(inference_dynamic_batching_buffer_size_gb=0.1) as engine:
        records = engine.generate(list(PROMPTS.values()), PARAMS)
    assert not [record.error for record in records if record.error]
    assert min(map(margin, records)) > LEAST_MARGIN, "two tokens are nearly equal; choose another prompt"
    return {name: pinned(record) for name, record in zip(PROMPTS, records, strict=True)}


def pinned(record: RequestRecord) -> dict[str, object]:
    """Return the part of a record that must stay the same."""
    assert record.generated_log_probs is not None, "the request asks for them"
    return {
        "text": record.generated_text,
        "tokens": list(record.generated_tokens),
        "log_probs": [round(one, 6) for one in record.generated_log_probs],
        "finish_reason": record.finish_reason,
    }


def margin(record: RequestRecord) -> float:
    """Return the smallest difference of the log-probs of the two best tokens, over all positions."""
    assert record.generated_top_n_log_probs is not None, "the request asks for them"
    best = [sorted(top.values(), reverse=True) for top in record.generated_top_n_log_probs]
    return min(first - second for first, second, *_ in best)


def compare(found: dict[str, dict[str, object]], golden: dict[str, dict[str, object]]) -> None:
    """Check that outputs equal the golden ones.

    Raises:
        AssertionError: Names the prompt.
    """
    assert found.keys() == golden.keys(), "other prompts; write the golden values anew"
    for name, expected in golden.items():
        for field in ("tokens", "text", "finish_reason"):
            assert found[name][field] == expected[field], f"{name}: {field}"
        assert _farthest(found[name]["log_probs"], expected["log_probs"]) <= TOLERANCE, f"{name}: log_probs"


def _farthest(found: object, expected: object) -> float:
    assert isinstance(found, list)
    assert isinstance(expected, list)
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))


def test_outputs_are_the_golden_ones() -> None:
    """Fails when the model, its weights, its tokenizer or the engine changes what users get."""
    compare(outputs(), json.loads(GOLDEN.read_text("utf-8")))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(outputs(), indent=1) + "\n", "utf-8")
    print(f"{GOLDEN} is written")
