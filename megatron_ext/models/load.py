"""Model loading: from settings to a model, its configuration and its tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.config import ModelConfig, ParallelConfig, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.differences import (
    EMBEDDED_CONFIG,
    EMBEDDED_MODEL_DIR,
    as_flag,
    differences,
    with_runtime_overrides,
)
from megatron_ext.config.model_folder import require_model_folder
from megatron_ext.config.source import AUTO_TYPE, HUGGING_FACE_TOKENIZER, NULL_TOKENIZER
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.config_fields import checked_fields
from megatron_ext.models.huggingface.hf_checkpoint import load_hf_weights, read_hf_config, with_prediction
from megatron_ext.models.megatron.directory import TokenizerSource, require_replaceable
from megatron_ext.models.megatron.dist_checkpoint import (
    load_dist_weights,
    read_dist_config,
    require_intact,
    resolve_iteration,
    save_dist_checkpoint,
)
from megatron_ext.models.megatron.kept_tokenizers import LibraryTokenizer, has_kept_tokenizer
from megatron_ext.models.megatron.training_args import TrainingFacts
from megatron_ext.models.overrides import fitting_overrides, require_layout
from megatron_ext.models.tokenizers import VocabularySizes, choose_tokenizer
from megatron_ext.parallel.collectives import decided_by_first
from megatron_ext.parallel.layout import describe_stages, split_layers
from megatron_ext.parallel.world import is_first_rank
from megatron_ext.text.tokenizer import NullTokenizer, TextTokenizer, Tokenizer
from megatron_ext.text.tokenizer_files import has_tokenizer

logger = logging.getLogger(__name__)

_PREDICTION = "mtp_num_layers"
_WITHOUT_PREDICTION: FieldValues = {
    _PREDICTION: None,
    "mtp_use_repeated_layer": False,
    "mtp_hybrid_override_pattern": None,
}


@dataclass(frozen=True)
class LoadedModel:
    """Model ready for inference (eval mode), with its configuration, tokenizer and parameter dtype."""

    model: HybridModel
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    name: str  # the checkpoint's directory as given, "embedded", or "random weights, <pattern>"
    directory: Path | None = None  # of the files of the weights; None for random ones
    packs_weights: bool = True  # the default of `BatchingConfig.pack_weights`; False for a model of a caller


def load_model(
    source: SourceConfig,
    overrides: FieldValues,
    *,
    parallel: ParallelConfig | None = None,
    device: torch.device | None = None,
    reads_prediction: bool = False,
) -> LoadedModel:
    """Load `--load` or `--load-hf`; without either, the embedded model, or random weights for other settings.

    The settings that differ from the embedded model are logged, since the weights are random then.

    Args:
        source: Location and dtype of the model.
        overrides: `ModelConfig` fields from flags or a YAML file; see `fitting_overrides`.
        parallel: Parallel sizes; every rank calls this. None takes the sizes of Megatron's groups.
        device: Default: the current CUDA device, else the CPU. On the device meta no weights are read: the model has
            shapes only, with the types that it has on the default device.
        reads_prediction: Whether a checkpoint's layers of multi-token prediction are read in any case; else they are if
            they are to be saved, or if a flag names them.

    Raises:
        ConfigError: A model that the sizes cannot divide, a missing directory or tokenizer, an override that
            contradicts the stored weights, a checkpoint that does not fit (`CheckpointError`), or a `--save` that
            `save_model` would refuse.
    """
    overrides = checked_fields(overrides, "the model's settings", ConfigError)
    if source.save is not None:
        directory_to_save = source.save
        decided_by_first(lambda: require_replaceable(directory_to_save))  # before anything large is read
    device = device or platform.device()
    has_weights = device.type != "meta"
    dtype = _dtype(source, device if has_weights else platform.device())
    directory = _checkpoint_directory(source, overrides)
    if directory is None:
        config, tokenizer = _without_checkpoint(source, overrides)
        name = f"random weights, {config.hybrid_override_pattern}"
    else:
        name = source.load or source.load_hf or "embedded"
        if source.load and has_weights:
            require_intact(directory)
        reads_prediction = reads_prediction or source.save is not None or overrides.get(_PREDICTION) is not None
        config, trained = checkpoint_config(source, directory, overrides, reads_prediction=reads_prediction)
        ids = VocabularySizes(overrides.get("vocab_size"), config.vocab_size)
        tokenizer = choose_tokenizer(source, _tokenizer_directory(source, directory), ids, trained)
        _warn_of_more_ids(tokenizer, config, directory)
    model = build_model(
        config,
        dtype=dtype,
        device=device,
        seed=source.seed,
        perform_initialization=has_weights and directory is None,
        parallel=parallel,
        transformer_impl=source.transformer_impl,
    )
    stages = split_layers(config.layer_count, platform.group_sizes(parallel))
    if len(stages) > 1 and torch.distributed.get_rank() == 0:
        logger.info("%s", describe_stages(config.hybrid_override_pattern, stages))
    if has_weights and directory is not None:
        fill_model(model, config, source, directory)
    return LoadedModel(model, config, tokenizer, dtype, name, directory)


def fill_model(model: HybridModel, config: ModelConfig, source: SourceConfig, directory: Path) -> None:
    """Read every tensor of a model from a checkpoint.

    Args:
        model: Built from `config`.
        config: See `checkpoint_config`.
        source: Determines the format of the checkpoint.

    Raises:
        CheckpointError: A tensor is missing, unknown, of another shape, or damaged. The model may be half filled.
    """
    if source.load:
        load_dist_weights(model, directory)
    else:
        load_hf_weights(model, config, directory, source.hf_overrides)


def save_model(directory: str | Path, loaded: LoadedModel, save: Callable[..., None] = save_dist_checkpoint) -> None:
    """Save a checkpoint of weights in their dtypes, configuration, tokenizer; every rank calls this.

    Args:
        directory: See `save`.
        save: `save_dist_checkpoint`, as for `--save`, or `save_hf_checkpoint`.
    """
    tokenizer = loaded.tokenizer
    source: TokenizerSource | None = None
    if isinstance(tokenizer, TextTokenizer):
        source = tokenizer.path
    elif isinstance(tokenizer, LibraryTokenizer):
        source = tokenizer
    elif not isinstance(tokenizer, NullTokenizer):
        logger.warning(
            "%s is saved without its tokenizer (%s), which has no files", directory, type(tokenizer).__name__
        )
    save(directory, loaded.model, loaded.config, source, loaded.dtype)


def _dtype(source: SourceConfig, device: torch.device) -> torch.dtype:
    if source.parameter_type != AUTO_TYPE:
        dtype: torch.dtype = getattr(torch, source.parameter_type)
        return dtype
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _checkpoint_directory(source: SourceConfig, overrides: FieldValues) -> Path | None:
    """Return the directory of the weights; None for random ones."""
    for flag, given in (("--load", source.load), ("--load-hf", source.load_hf)):
        if given is not None:
            folder = require_model_folder(flag, given)
            return resolve_iteration(folder) if flag == "--load" else folder
    flags = [as_flag(name, overrides[name], saved) for name, saved in differences(EMBEDDED_CONFIG, overrides).items()]
    if source.padded_vocab_size not in (None, EMBEDDED_CONFIG.vocab_size):
        flags.append(as_flag("padded_vocab_size", source.padded_vocab_size, EMBEDDED_CONFIG.vocab_size))
    if not flags:
        return EMBEDDED_MODEL_DIR
    verb = "describes" if len(flags) == 1 else "describe"
    logger.warning("%s %s a model other than the embedded one: its weights are random", ", ".join(flags), verb)
    return None


def checkpoint_config(
    source: SourceConfig, directory: Path, overrides: FieldValues, *, reads_prediction: bool
) -> tuple[ModelConfig, TrainingFacts | None]:
    """Return a checkpoint's configuration with the overrides, and its training facts if it is Megatron-LM's.

    Args:
        source: Determines the format of the checkpoint.
        overrides: As for `load_model`.
        reads_prediction: Whether its layers of multi-token prediction are part of it.

    Raises:
        ConfigError: The overrides contradict the stored weights; the configuration is missing or invalid.
    """
    trained = None
    if source.load:
        saved, trained = read_dist_config(directory, overrides.get("vocab_size"), spec_is_given="spec" in overrides)
    else:
        saved = read_hf_config(directory, source.hf_overrides)
    if not reads_prediction:
        saved = dataclasses.replace(saved, **_WITHOUT_PREDICTION)
    elif source.load is None:
        saved = with_prediction(saved, directory, source.hf_overrides)
    if source.load is None and source.load_hf is None:
        return with_runtime_overrides(saved, overrides), None
    config = dataclasses.replace(saved, **fitting_overrides(source, saved, overrides, directory, trained))
    require_layout(saved, config, directory)
    return config, trained


def _without_checkpoint(source: SourceConfig, overrides: FieldValues) -> tuple[ModelConfig, Tokenizer]:
    """Return configuration and tokenizer for random weights; the tokenizer sets the vocabulary size if no flag does."""
    config = ModelConfig(**overrides)
    asked, rows = config.vocab_size, source.padded_vocab_size
    if asked is not None and rows is not None and asked > rows:
        raise ConfigError(f"--vocab-size {asked} is more than --padded-vocab-size {rows}; give at most that")
    is_text = source.tokenizer_model is not None or source.tokenizer_type == HUGGING_FACE_TOKENIZER
    is_text = is_text or (asked is None and rows is None and source.tokenizer_type != NULL_TOKENIZER)
    tokenizer = choose_tokenizer(source, EMBEDDED_MODEL_DIR if is_text else None, VocabularySizes(asked, rows))
    size = rows or asked or tokenizer.vocab_size
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, --vocab-size is {size}; give another --tokenizer-model, or "
            "none"
        )
    return dataclasses.replace(config, vocab_size=size), tokenizer


def _tokenizer_directory(source: SourceConfig, directory: Path) -> Path:
    """Return the directory of a checkpoint's tokenizer: beside its weights, or above them, beside all iterations."""
    has_own = has_tokenizer(directory) or has_kept_tokenizer(directory)
    return Path(source.load) if source.load and not has_own else directory


def _warn_of_more_ids(tokenizer: Tokenizer, config: ModelConfig, directory: Path) -> None:
    """Warn of ids that prompts may not have; published folders have tokenizers with a few added tokens."""
    assert config.vocab_size is not None, "a checkpoint says it"
    if tokenizer.vocab_size > config.vocab_size and is_first_rank():
        logger.warning(
            "the tokenizer has %d ids, the model in %s has %d; prompts with one of the others are refused",
            tokenizer.vocab_size,
            directory,
            config.vocab_size,
        )
