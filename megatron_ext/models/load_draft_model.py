"""Draft model: loaded like any other, on rank 0, and checked against the target model's vocabulary (SP-1)."""

from __future__ import annotations

import torch

from megatron_ext.config import ParallelConfig, SourceConfig
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.config.tokenizer import NULL_TOKENIZER
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.draft_model_engine import DraftParts
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.text.tokenizer import NullTokenizer, Tokenizer


def load_draft_model(
    speculation: SpeculationConfig, source: SourceConfig, parallel: ParallelConfig, loaded: LoadedModel
) -> DraftParts | None:
    """Load the draft model on rank 0; None if the settings have no draft model.

    Args:
        speculation: Settings with the draft model's location.
        source: Source of the target model: parameters have the same dtype.
        parallel: Parallel sizes of the target model.
        loaded: The target model.

    Raises:
        ConfigError: The draft model cannot be loaded or has another vocabulary, or the target model has several ranks.
    """
    if not speculation.has_draft_model:
        return None
    _check_ranks(speculation, parallel)
    is_null = source.tokenizer_type == NULL_TOKENIZER
    its_source = SourceConfig(
        load=speculation.speculative_load,
        load_hf=speculation.speculative_load_hf,
        tokenizer_type=NULL_TOKENIZER if is_null else None,
        bf16=source.bf16,
        fp16=source.fp16,
        seed=source.seed,
    )
    try:
        draft = load_model(its_source, {})
    except ConfigError as error:
        raise ConfigError(f"the draft model: {error}") from error
    check_same_vocabulary(loaded.tokenizer, draft.tokenizer, draft.name)
    return DraftParts(draft.model, draft.config, draft.tokenizer, draft.dtype)


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


def _check_ranks(speculation: SpeculationConfig, parallel: ParallelConfig) -> None:
    if parallel.smallest_world > 1:
        raise ConfigError(
            f"{parallel.described()} and --speculative-method draft_model contradict each other: a draft model runs "
            f"on rank 0 only; give --speculative-method ngram"
        )
    ranks = torch.distributed.get_world_size()
    if ranks > 1 and speculation.speculative_load is not None:
        raise ConfigError(
            f"--speculative-load {speculation.speculative_load} is a checkpoint that all of {ranks} ranks would "
            f"read together, and a draft model runs on rank 0 only; give --speculative-load-hf"
        )


def check_same_vocabulary(tokenizer: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Check that every id of either model is the same text in both.

    Args:
        tokenizer: Tokenizer of the target model.
        draft: Tokenizer of the draft model.
        name: Name of the draft model, for the error.

    Raises:
        ConfigError: An id differs.
    """
    if isinstance(draft, NullTokenizer) and not isinstance(tokenizer, NullTokenizer):
        raise ConfigError(f"the draft model {name} has no tokenizer to compare; put the large model's beside it")
    ours, theirs = frozenset(tokenizer.token_ids), frozenset(draft.token_ids)
    if ours != theirs:
        token = min(ours ^ theirs)
        difference = "has no token for it" if token in ours else "has one, and the large one does not"
        raise ConfigError(
            f"the draft model {name} has {len(theirs)} tokens, the large one {len(ours)}; of id {token} it "
            f"{difference}; give one with the same tokenizer"
        )
    for token in sorted(ours):
        text, draft_text = (one.detokenize([token], skip_special_tokens=False) for one in (tokenizer, draft))
        if text != draft_text:
            raise ConfigError(
                f"{name} token {token} is {draft_text!r} in the draft model and {text!r} in the large model; give a "
                "draft model with the same tokenizer"
            )
