"""SP-15: new weights reach the last stage's copy of the embedding, whichever way they come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext import RequestParams, follow_engine, load_engine, load_follower
from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.weight_shards import model_tensors
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from tests.unit_tests.support.multi_token import Logits, build_predicting, difference, watched
from tests.unit_tests.support.ranks import run_ranks

CONFIG = ModelConfig(
    hybrid_override_pattern="M*-*-",
    hidden_size=64,
    num_attention_heads=4,
    mamba_num_groups=2,
    vocab_size=300,
    untie_embeddings_and_output_weights=True,
    mtp_num_layers=2,
    mtp_hybrid_override_pattern="*-",
)
SETTINGS = {
    "tokenizer_type": "NullTokenizer",
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 64,
    "inference_dynamic_batching_max_requests": 4,
    "speculative_method": "mtp",
    "num_speculative_tokens": 2,
    "speculative_adaptive": False,
    "distributed_timeout_minutes": 2.0,
}
PROMPTS = [[5, 9, 40] * 20, [7, 8, 9, 10]]
PARAMS = RequestParams(num_tokens_to_generate=12, return_log_probs=True, ignore_eos=True)
EMBEDDING = "embedding.word_embeddings.weight"
ONE, TWO = {}, {"pipeline_model_parallel_size": 2}

Outcome = list[tuple[list[int], int, int, int, list[float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A saved model, and one with another embedding, which its output layer follows."""
    model, found = build_predicting("hybrid", CONFIG), []
    for name in ("old", "new"):
        found.append(str(tmp_path_factory.mktemp(name) / "model"))
        save_dist_checkpoint(found[-1], model, CONFIG)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            words = model.embedding.word_embeddings.weight
            words.add_(torch.randn(words.shape, generator=generator))
            model.output_layer.weight.copy_(words.roll(1, dims=0))
    return found[0], found[1]


def outcomes(engine) -> Outcome:
    return [
        (
            list(one.generated_tokens),
            one.skipped_prefill_token_count,
            one.draft_token_count,
            one.accepted_token_count,
            list(one.generated_log_probs),
        )
        for one in engine.generate(PROMPTS, PARAMS)
    ]


def whole(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a saved model."""
    loaded = load_model(SourceConfig(load=folder, tokenizer_type="NullTokenizer"), {}, reads_prediction=True)
    return {name: one.detach().clone() for name, one in model_tensors(loaded.model).items()}


def of_rank_0(way: str, sizes: dict[str, int], folders: tuple[str, str], given: dict[str, torch.Tensor]) -> object:
    """Outcomes with old and new weights, which the first rank hands over; the others follow."""
    settings = SETTINGS | sizes | {"load": folders[0]}
    if dist.is_initialized() and dist.get_rank():
        return follow_engine(**settings)
    with load_engine(**settings) as engine:
        seen = [outcomes(engine)]
        if way == "disk" and sizes:
            engine._call(engine.weight_writer.read_checkpoint(Path(folders[1])))
            engine.weights_changed()
        else:
            engine.update_weights(given, partial=way == "embedding")  # equal to the files
        return [*seen, outcomes(engine)]


def of_shards(sizes: dict[str, int], folders: tuple[str, str]) -> object:
    """Outcomes with old and new weights, of which each rank hands over its own."""
    parallel = ParallelConfig(**sizes)
    platform.initialize(parallel)
    source = SourceConfig(load=folders[1], tokenizer_type="NullTokenizer")
    trained = load_model(source, {}, parallel=parallel, reads_prediction=True).model
    given = {name: one.detach().clone() for name, one in model_tensors(trained).items()}
    assert EMBEDDING in given
    is_first = dist.get_rank() == 0
    engine = (load_engine if is_first else load_follower)(**SETTINGS, **sizes, load=folders[0])
    seen = [outcomes(engine)] if is_first else []
    engine.update_weights_from_shards(given)
    if is_first:
        seen.append(outcomes(engine))
    engine.close()
    return seen


def program(way: str, sizes: dict[str, int], folders: tuple[str, str], given: dict) -> tuple[object, Logits]:
    with watched() as logits:
        seen = of_shards(sizes, folders) if way == "shards" else of_rank_0(way, sizes, folders, given)
    return seen, logits


@pytest.mark.worlds
@pytest.mark.parametrize("way", ["tensors", "embedding", "disk", "shards"])
def test_new_weights_of_stages(way, folders):
    """SP-15, RL-1, RL-7: tokens, counts and the logits of drafts equal one rank's, before and after."""
    given = whole(folders[1])
    if way == "embedding":
        given = {EMBEDDING: given[EMBEDDING]}
    ((alone, expected),) = run_ranks(program, 1, way, ONE, folders, given)
    (lived, first), (_, last) = run_ranks(program, 2, way, TWO, folders, given)
    assert not first
    assert difference(last, expected) < 1e-4
    for got, want in zip(lived, alone, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one[:4] == other[:4]
            assert one[4] == pytest.approx(other[4], abs=1e-4)
    assert lived[0] != lived[1]
    assert sum(accepted for _, _, _, accepted, _ in lived[0]) > 3
