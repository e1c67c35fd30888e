"""Engines with imported NemotronH and Llama models: tokens and log-probs equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.config import BatchingConfig, RequestParams, SourceConfig
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.scheduling.record import RequestRecord, Status
from tests.on_request import long_except
from tests.unit_tests.models.huggingface import llama_oracle
from tests.unit_tests.models.huggingface import nemotron_h_oracle as oracle

SHAPES = {"oracles": oracle.SHAPES, "llamas": llama_oracle.SHAPES}
LENGTHS = (65, 1, 300, 3, 4, 129, 64)
GENERATED = 10
CHUNKED = BatchingConfig(block_size=16, block_count=80, max_requests=8, max_tokens=48)
WHOLE = BatchingConfig(block_size=16, block_count=80, max_requests=8, max_tokens=1024, enable_chunked_prefill=False)
PARAMS = RequestParams(num_tokens_to_generate=GENERATED, return_log_probs=True)


def import_model(directory: Path) -> LoadedModel:
    return load_model(SourceConfig(load_hf=str(directory)), {}, device=torch.device("cpu"))


def serve(loaded: LoadedModel, batching: BatchingConfig, prompts: Sequence[list[int]]) -> list[RequestRecord]:
    engine = build_engine(loaded.model, loaded.config, loaded.tokenizer, batching, dtype=loaded.dtype)
    return engine.generate(prompts, PARAMS)


def outside(record: RequestRecord, logits_of: Callable[[list[int]], Tensor]) -> list[str]:
    """Differences from the reference, empty if equal. Greedy tokens may be either of two closer than 1e-4."""
    prompt, generated = list(record.prompt_tokens), list(record.generated_tokens)
    logits = logits_of(prompt + generated)
    chosen = logits[len(prompt) - 1 : -1]
    gaps = chosen.max(dim=-1).values - chosen[range(len(generated)), generated]
    wrong = [f"token {index}" for index in range(len(generated)) if gaps[index] > 1e-4]
    log_probs = logits.log_softmax(dim=-1)[range(len(logits) - 1), (prompt + generated)[1:]]
    got = torch.tensor([*record.prompt_log_probs, *record.generated_log_probs])
    assert len(got) == len(log_probs), "one log-prob for every token but the first"
    excess = oracle.largest_excess(got, log_probs)
    return [*wrong, f"log-probs {excess:.1f} times the tolerance"] if excess > 1 else wrong


CASES = [(fixture, shape.name) for fixture, shapes in SHAPES.items() for shape in shapes]
QUICK = [("oracles", "mha"), ("oracles", "MoE, latent, one expert a token"), ("llamas", "gqa, tied")]


@pytest.mark.parametrize("batching", [CHUNKED, pytest.param(WHOLE, marks=pytest.mark.long)], ids=["chunked", "whole"])
@pytest.mark.parametrize(("fixture", "name"), long_except(QUICK, CASES))
def test_mixed_batch_equals_transformers(
    fixture: str, name: str, batching: BatchingConfig, request: pytest.FixtureRequest
) -> None:
    theirs, directory = request.getfixturevalue(fixture)(name)
    prompts = [oracle.prompt(length, seed=length) for length in LENGTHS]
    records = serve(import_model(directory), batching, prompts)
    for record, prompt in zip(records, prompts, strict=True):
        assert record.status is Status.COMPLETED, record.error
        assert len(record.generated_tokens) == GENERATED
        assert outside(record, lambda tokens: oracle.their_logits(theirs, tokens)) == [], len(prompt)
    assert list(records[0].generated_tokens) == oracle.their_greedy(theirs, prompts[0], GENERATED)
    assert (records[2].step_count > GENERATED) is batching.enable_chunked_prefill


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SPOILED = {
    ("oracles", "convolution bias"): lambda m: m.get_parameter("decoder.layers.0.mixer.conv1d.bias").zero_(),
    ("oracles", "fast decay"): lambda m: m.get_parameter("decoder.layers.2.mixer.A_log").fill_(5.0),
    ("llamas", "gate rows"): lambda m: m.get_parameter("decoder.layers.1.mlp.linear_fc1.weight")[:8].zero_(),
    ("llamas", "query rows"): lambda m: m.get_parameter("decoder.layers.0.self_attention.linear_qkv.weight")[
        :8
    ].zero_(),
}


@pytest.mark.parametrize(("fixture", "control"), SPOILED)
@torch.no_grad()
def test_comparison_sees_one_wrong_tensor(fixture: str, control: str, request: pytest.FixtureRequest) -> None:
    """Negative controls."""
    theirs, directory = request.getfixturevalue(fixture)("mha")
    loaded = import_model(directory)
    SPOILED[fixture, control](loaded.model)
    for record in serve(loaded, CHUNKED, [oracle.prompt(length, seed=length) for length in (64, 129)]):
        assert outside(record, lambda tokens: oracle.their_logits(theirs, tokens)) != []
