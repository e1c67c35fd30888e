"""Checks that a model has the layers of multi-token prediction that are to draft."""

from __future__ import annotations

from megatron_ext.config import ParallelConfig
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.load import LoadedModel


def check_prediction(speculation: SpeculationConfig, parallel: ParallelConfig, loaded: LoadedModel) -> None:
    """Check that a model has the layer that is to draft.

    Args:
        speculation: Settings with the method.
        parallel: Parallel sizes of the model.
        loaded: The model.

    Raises:
        ConfigError: It has none, fewer than drafts if several have weights of their own, or experts that ranks share.
    """
    if not speculation.has_prediction:
        return
    _check_experts(parallel, loaded)
    layers, drafts = loaded.config.mtp_layer_count, speculation.num_speculative_tokens
    if not layers:
        raise ConfigError(
            f"--speculative-method mtp needs layers of multi-token prediction, and {loaded.name} has none; give "
            "--speculative-method ngram"
        )
    if 1 < layers < drafts:
        raise ConfigError(
            f"--num-speculative-tokens {drafts} is more than the {layers} layers of multi-token prediction of "
            f"{loaded.name}, one for each draft; give --num-speculative-tokens {layers}"
        )


def _check_experts(parallel: ParallelConfig, loaded: LoadedModel) -> None:
    experts, remedy = parallel.expert_model_parallel_size, "leave it out, or give --speculative-method ngram"
    if experts > 1 and "E" in loaded.config.mtp_pattern:
        raise ConfigError(
            f"--speculative-method mtp and --expert-model-parallel-size {experts} contradict each other: the layer of "
            f"multi-token prediction of {loaded.name} has experts, and a replica computes it alone; {remedy}"
        )
