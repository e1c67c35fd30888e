"""Engines attached on several ranks, in phases: requests, training, requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_ext import AttachedEngine, ConfigError, EngineClosed, EngineFollower, RequestParams, attach_engine
from megatron_ext.config import ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.checkpoint.checkpoint_files import write_state
from tests.unit_tests.api.conftest import ATTACHED
from tests.unit_tests.support import megatron_models as models
from tests.unit_tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("upstream")

SETTINGS = ATTACHED | {"distributed_timeout_minutes": 2.0}
COUNT = 6
PARAMS = RequestParams(num_tokens_to_generate=COUNT, return_log_probs=True, skip_prompt_log_probs=True)
TOLERANCE = 1e-4  # of log-probs
SCALES = (1.0, 1.2, 0.9)  # of all weights in each phase
# Layout -> kind of model, sizes of the groups, fields of the model's configuration.
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, object]]] = {
    "gpt, tensor": ("llama", {"tensor_model_parallel_size": 2}, {}),
    "gpt, uneven stages, tied": (
        "nemotron",
        {"pipeline_model_parallel_size": 2},
        {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3},
    ),
    "gpt, experts": ("experts", {"expert_model_parallel_size": 2}, {}),
    "hybrid, tensor": ("hybrid", {"tensor_model_parallel_size": 2}, {}),
    "hybrid, stages": ("hybrid", {"pipeline_model_parallel_size": 2}, {}),
    "hybrid, tensor and stages": (
        "hybrid",
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {},
    ),
    "hybrid, experts and tensor": (
        "hybrid, experts",
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {},
    ),
}
DRAFTING = {"speculative_method": "ngram", "num_speculative_tokens": 2, "speculative_ngram_shortest": 1}
RANKS = {"hybrid, tensor and stages": 4}  # of layouts that do not have two


@torch.no_grad()
def train(model: nn.Module, phase: int) -> None:
    """Change the weights in place, in the same way on every layout."""
    for parameter in model.parameters():
        parameter.mul_(SCALES[phase])


def load(model: nn.Module, directory: Path) -> nn.Module:
    """Read this rank's part of a checkpoint with upstream's reader."""
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(directory)), strict=False)
    return model


def answers(engine: AttachedEngine) -> list[tuple[list[int], int, list[float]]]:
    records = [engine.generate(models.PROMPT, PARAMS)[0] for _ in range(2)]
    return [
        (list(one.generated_tokens), one.skipped_prefill_token_count, list(one.generated_log_probs or ()))
        for one in records
    ]


def phases(layout: str, directory: str, settings: dict[str, object]) -> object:
    """Tokens of each phase on the first rank; on the others, whether everything was left as it was."""
    name, sizes, fields = LAYOUTS[layout]
    with models.stand_ins():
        platform.initialize(ParallelConfig(**sizes))
        model = load(models.build(name, seed=9, **fields), Path(directory))
        model.train()
        before = models.snapshot(model)["attributes"]
        engine = attach_engine([model], None, **SETTINGS | settings)
        found = []
        for phase in range(len(SCALES)):
            train(model, phase)
            dist.barrier()  # a collective of the program, beside an idle engine
            if isinstance(engine, EngineFollower):
                engine.follow()
                continue
            engine.resume()
            found.append(answers(engine))
            if phase + 1 < len(SCALES):
                engine.suspend()
            else:
                engine.close()
        dist.barrier()
        if isinstance(engine, EngineFollower):
            with pytest.raises(EngineClosed):
                engine.follow()
        return found or (engine.is_closed and model.training and models.snapshot(model)["attributes"] == before)


def refused(_: object) -> str:
    """Message on a rank whose own part of the model can be attached, or cannot."""
    with models.stand_ins():
        platform.initialize(ParallelConfig(tensor_model_parallel_size=2))
        model = models.build("llama")
        if dist.get_rank() == 1:
            model.decoder.layers[1].mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError) as caught:
            attach_engine(model, None, **SETTINGS)
        return str(caught.value)


@pytest.mark.worlds
class TestWorlds:
    """Several ranks, each with its part of a model in the program's own process groups."""

    @pytest.mark.parametrize(
        ("layout", "settings"),
        [*((layout, {}) for layout in LAYOUTS), ("hybrid, tensor", DRAFTING), ("gpt, experts", DRAFTING)],
    )
    def test_phases_equal_those_of_one_rank(self, layout: str, settings: dict[str, object], tmp_path: Path) -> None:
        """Requests, training and requests again: tokens equal the whole model's own forward.

        SP-17: with drafts, whose costs all ranks measure before they return from `attach_engine`.
        """
        name, _, _ = LAYOUTS[layout]
        model = models.build(name)
        write_state({"model": model.sharded_state_dict()}, tmp_path)
        expected = []
        for phase in range(len(SCALES)):
            train(model, phase)
            tokens, log_probs = models.generate(model, models.PROMPT, COUNT)
            close = pytest.approx(log_probs, abs=TOLERANCE)
            expected.append([(tokens, 0, close), (tokens, 32, close)])
        found, *followers = run_ranks(phases, RANKS.get(layout, 2), layout, str(tmp_path), settings)
        assert found == expected
        assert followers == [True] * len(followers)

    def test_a_part_that_is_refused_is_refused_on_all_ranks(self) -> None:
        first, second = run_ranks(refused, 2, None)
        assert first == second
        assert first.startswith("rank 1: decoder.layers.1.mlp has the forward hook")
