"""PY-18: `--dry-run` plans, from the configuration alone, what a start plans of the loaded model."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from arguments import parse_arguments
from megatron_ext.console.kv_cache_table import print_dry_run, print_engine
from megatron_ext.errors import ConfigError
from megatron_ext.models.engine_args import EngineArgs, plan_without_weights
from megatron_ext.models.llm_engine import LLMEngine

_BATCHING = "--inference-dynamic-batching"
BUDGET = f"{_BATCHING}-buffer-size-gb 0.02 {_BATCHING}-block-size 16 {_BATCHING}-max-requests 6".split()

LONG = "--use-checkpoint-args --inference-max-seq-length 100k".split()  # the model's positions decide


def rows(print_table: Callable[..., None], *what: object) -> list[str]:
    console = Console(file=io.StringIO(), width=400)
    print_table(*what, console)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines() if line.startswith("│")]


@pytest.mark.parametrize("name", ["llama", "nemotron MoE", "qwen3_next", "jamba", "falcon_h1"])
@pytest.mark.parametrize("flags", [LONG, ["--dtype", "bfloat16"]], ids=["fp32", "bf16"])
def test_the_plan_is_that_of_a_start(name: str, flags: list[str], oracles, tmp_path: Path) -> None:
    """Shapes of every kind of state, with a given budget; the folder of the dry run has no weights."""
    _, directory = oracles(name)
    shutil.copytree(directory, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    dry = plan_without_weights(parse_arguments([str(tmp_path / "model"), *BUDGET, *flags]))
    args = EngineArgs(parse_arguments([str(directory), *BUDGET, *flags]))
    weights = sum(one.numel() * one.element_size() for one in args.loaded.model.parameters())
    engine = LLMEngine(args.build_engine())
    try:
        assert (dry.plan.world, dry.weight_bytes) == (engine.geometry, weights)
        assert dry.plan.limits == engine.limits
        started, planned = rows(print_engine, engine, "a model"), rows(print_dry_run, dry)
        assert [row for row in started if not row.startswith(("│ operators", "│ packed weights"))] == planned[:-5]
    finally:
        engine.close()


def test_requests_that_fit_at_once() -> None:
    """Limited by blocks of 64 tokens and by the running requests; none if longer than the model or the pool."""
    words = f"{_BATCHING}-block-count 20 {_BATCHING}-max-requests 6 {_BATCHING}-prefix-caching-mamba-slots 0"
    dry = plan_without_weights(parse_arguments(words.split()))
    found = {tokens: dry.requests_at_once(tokens) for tokens in (1, 64, 256, 257, 1280, 1281, 5000)}
    assert found == {1: 6, 64: 6, 256: 5, 257: 4, 1280: 1, 1281: 0, 5000: 0}
    assert dry.plan.limits.max_model_len == 1280


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--dry-run plans a single rank; leave torchrun out"):
        plan_without_weights(parse_arguments([]))
