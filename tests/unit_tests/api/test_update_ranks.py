"""RL-1: new weights on all ranks: tokens and log-probs equal one rank's that was loaded with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext import ConfigError, RequestParams, WeightUpdateError, follow_engine, load_engine, load_follower
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.models.update import disk, writer
from tests.unit_tests.support.new_weights import new_weights, write_checkpoint
from tests.unit_tests.support.ranks import run_ranks

SETTINGS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_block_count": 200,
    "inference_dynamic_batching_max_requests": 16,
    "inference_dynamic_batching_prefix_caching_mamba_slots": 32,
}
SHARED = "The import statement finds a module, loads it and binds its name in the local namespace. "
PROMPTS = [SHARED + "When it fails", [5, 6, 7, 8], SHARED + "Packages are"]
PARAMS = RequestParams(num_tokens_to_generate=10, return_log_probs=True, skip_prompt_log_probs=True)
EXPERTS = {
    "hybrid_override_pattern": "ME*E",
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "mamba_state_dim": 16,
    "mamba_head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_num_groups": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 2,
    "vocab_size": 97,
    "tokenizer_type": "NullTokenizer",
}
NORM = "decoder.final_norm.weight"


def outcomes(engine) -> list[tuple]:
    return [(one.generated_tokens, one.generated_log_probs) for one in engine.generate(PROMPTS, PARAMS)]


def fail_once(rank: int) -> None:
    """Make the next write of the rank fail after the first bucket."""
    write, calls = writer.WeightWriter._write_whole, iter(range(10**6))

    def failing(self, recipes, parts):
        if next(calls) == 1:
            raise ZeroDivisionError("planted")
        write(self, recipes, parts)

    if dist.get_rank() == rank:
        writer.WeightWriter._write_whole = failing


def lack_memory_once() -> None:
    """Let this rank alone find a reason against the next update, before anything is written."""
    keep = writer.copy_weights

    def lacking(*_: object) -> dict[str, torch.Tensor]:
        writer.copy_weights = keep
        raise ConfigError("planted")

    writer.copy_weights = lacking


def fail_to_swap_once() -> None:
    """Make the next write of a checkpoint fail in its middle."""
    swap, calls = disk._swap, iter(range(10**6))

    def failing(one: torch.Tensor, other: torch.Tensor) -> None:
        if next(calls) == 5:
            raise ZeroDivisionError("planted")
        swap(one, other)

    disk._swap = failing


def program(sizes: dict) -> object:
    """Outcomes on rank 0: with the old weights, after a refusal, after each update, and after failures on rank 1."""
    writer.BUCKET_BYTES = 200_000
    settings = SETTINGS | sizes
    fail_once(1)
    if dist.get_rank():
        return follow_engine(**settings)
    new = new_weights()
    with load_engine(**settings) as engine:
        seen = {"shapes": engine.weight_shapes(), "old": outcomes(engine)}
        for wrong in ({NORM: torch.ones(3)}, {"decoder.layers.0.what": torch.ones(3)}):
            with pytest.raises(ConfigError):
                engine.update_weights(wrong, partial=True)
        with pytest.raises(ConfigError, match="are missing"):
            engine.update_weights({NORM: new[NORM]})
        assert engine.generate(PROMPTS[0], PARAMS)[0].skipped_prefill_token_count > 0
        seen["refused"] = outcomes(engine)
        with pytest.raises(WeightUpdateError, match="rank 1: ZeroDivisionError: planted; write all weights again"):
            engine.update_weights(new)
        assert engine.statistics().use.blocks_cached == 0
        with pytest.raises(WeightUpdateError):
            engine.generate(PROMPTS, PARAMS)
        engine.update_weights({NORM: new[NORM]}, partial=True)
        with pytest.raises(WeightUpdateError):
            engine.generate(PROMPTS, PARAMS)
        engine.update_weights(new, weights_version=5)
        seen["new"] = outcomes(engine)
        assert engine.generate(PROMPTS[0], PARAMS)[0].weights_version == ((5, 10),)
    return seen


def restoring(sizes: dict) -> object:
    """Outcomes on rank 0 with the old weights, and after a failed update that kept them."""
    writer.BUCKET_BYTES = 200_000
    settings = SETTINGS | sizes | {"distributed_timeout_minutes": 2.0}
    fail_once(1)
    if dist.get_rank():
        lack_memory_once()
        return follow_engine(**settings)
    with load_engine(**settings) as engine:
        before = outcomes(engine)
        with pytest.raises(ConfigError, match="rank 1: planted"):
            engine.update_weights(new_weights(), keep_old=True)
        assert_equal(outcomes(engine), before)
        with pytest.raises(WeightUpdateError, match="the old weights are back"):
            engine.update_weights(new_weights(), keep_old=True)
        return before, outcomes(engine), engine.weights_version


def from_directories(folders: tuple[str, str]) -> object:
    """Outcomes on rank 0 after a checkpoint that fits, and the message of one that does not."""
    settings = SETTINGS | {"tensor_model_parallel_size": 2}
    if dist.get_rank():
        fail_to_swap_once()
        return follow_engine(**settings)
    good, bad = folders
    with load_engine(**settings) as engine:
        read = engine.weight_writer.read_checkpoint
        old = outcomes(engine)
        with pytest.raises(ConfigError) as refused:
            engine._call(read(Path(bad)))
        assert_equal(outcomes(engine), old)
        with pytest.raises(WeightUpdateError, match="rank 1: ZeroDivisionError: planted; the old weights are back"):
            engine._call(read(Path(good)))
        engine.weights_changed()
        assert_equal(outcomes(engine), old)
        engine._call(read(Path(good)))
        engine.weights_changed()
        return outcomes(engine), str(refused.value)


def spread(sizes: dict) -> object:
    """Outcomes on rank 0 of a model with experts and random weights, after an update."""
    settings = SETTINGS | EXPERTS | sizes
    if dist.is_initialized() and dist.get_rank():
        return follow_engine(**settings)
    with load_engine(**settings) as engine:
        generator = torch.Generator().manual_seed(2)
        shapes = sorted(engine.weight_shapes().items())
        engine.update_weights({name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes})
        params = RequestParams(num_tokens_to_generate=10, return_log_probs=True, ignore_eos=True)
        records = engine.generate([[5, 6, 7, 8], [9] * 40], params)
        return shapes, [(one.generated_tokens, one.generated_log_probs) for one in records]


def assert_equal(got: list[tuple], want: list[tuple]) -> None:
    for (tokens, log_probs), (wanted_tokens, wanted_log_probs) in zip(got, want, strict=True):
        assert tokens == wanted_tokens
        assert log_probs == pytest.approx(wanted_log_probs, rel=1e-4, abs=1e-4)


@pytest.mark.worlds(smoke=True)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2},
        pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_equal_to_one_rank(sizes: dict):
    """RL-1: whole tensors on the first rank reach all; mistakes change nothing; a failed write stops the engine."""
    seen, _ = run_ranks(program, 2, sizes)
    with load_engine(**SETTINGS) as engine:
        assert seen["shapes"] == engine.weight_shapes()
        old = outcomes(engine)
        engine.update_weights(new_weights())
        new = outcomes(engine)
    assert_equal(seen["old"], old)
    assert_equal(seen["refused"], old)
    assert_equal(seen["new"], new)
    with pytest.raises(AssertionError):
        assert_equal(old, new)


@pytest.mark.worlds
@pytest.mark.parametrize("sizes", [{"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}])
def test_experts(sizes: dict):
    """RL-1: experts of other ranks, too."""
    (shapes, found), _ = run_ranks(spread, 2, sizes)
    wanted_shapes, wanted = spread({})
    assert shapes == wanted_shapes
    assert_equal(found, wanted)


@pytest.mark.worlds
def test_checkpoints(tmp_path):
    """RL-1: each rank reads its part; one that does not fit, or a write that fails, leaves the old weights on all."""
    folders, norm = (tmp_path / "good", tmp_path / "bad"), "backbone.norm_f.weight"
    write_checkpoint(folders[0])
    write_checkpoint(folders[1], **{norm: torch.ones(3)})
    (found, told), _ = run_ranks(from_directories, 2, tuple(map(str, folders)))
    assert norm in told
    with load_engine(**SETTINGS) as engine:
        engine.update_weights(new_weights())
        assert_equal(found, outcomes(engine))


@pytest.mark.worlds
def test_old_weights_are_restored():
    """RL-1: keep_old pays for a copy, and a failed update leaves the old weights on all ranks."""
    (before, after, version), _ = run_ranks(restoring, 2, {"tensor_model_parallel_size": 2})
    assert_equal(after, before)
    assert version == 0


def changed_while_released(folder: str) -> object:
    """Tokens and skipped tokens on rank 0 before and after a change of weights while the other rank is released."""
    platform.initialize(ParallelConfig(tensor_model_parallel_size=2))
    settings = SETTINGS | {"tensor_model_parallel_size": 2, "prefix_cache_dir": folder}
    settings["distributed_timeout_minutes"] = 2.0
    if dist.get_rank():
        with load_follower(**settings) as follower:
            follower.follow()
            dist.barrier()
            follower.follow()
        return None
    seen = []
    with load_engine(**settings) as engine:
        for _ in range(2):
            (record,) = engine.generate(SHARED, PARAMS)
            seen.append((record.generated_tokens, record.skipped_prefill_token_count))
        engine.suspend()
        engine.weights_changed()
        engine.reset_prefix_cache()
        dist.barrier()
        engine.resume()
        (record,) = engine.generate(SHARED, PARAMS)
        return [*seen, (record.generated_tokens, record.skipped_prefill_token_count)]


@pytest.mark.worlds
def test_released_ranks_with_stores_are_not_awaited(tmp_path):
    """RL-1, DC-4: with a cache on disk; the other rank forgets its part when it follows again."""
    (cold, warm, again), _ = run_ranks(changed_while_released, 2, str(tmp_path))
    assert cold == again
    assert warm[0] == cold[0]
    assert warm[1] > cold[1] == 0
