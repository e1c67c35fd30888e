"""From keyword arguments to an engine. Everything heavy is imported once the settings are known to make sense."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from megatron_ext.api.settings import Setting, read_settings
from megatron_ext.config import InferenceSettings
from megatron_ext.errors import ConfigError
from megatron_ext.memory.limits import check_address_space

if TYPE_CHECKING:
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.ranks.layout import Layout


def load_engine(**settings: Setting) -> LoadedEngine:
    """Load a model and build an engine around it; without any setting the embedded model.

    >>> with load_engine(num_tokens_to_generate=8, inference_dynamic_batching_block_size=16) as engine:
    ...     (record,) = engine.generate("The import statement")
    >>> len(record.generated_tokens)
    8

    Args:
        settings: The flags of `tools/run_inference.py` that are about the engine, by name: `--load-hf DIR` is
            `load_hf=DIR`, `--inference-max-seq-length 4096` is `inference_max_seq_length=4096`, `--bf16` is
            `bf16=True`, `--no-enable-chunked-prefill` is `enable_chunked_prefill=False`. Sampling flags are what
            requests ask for that bring no `RequestParams`. A `model_config` file of flags stands below them.

    Raises:
        ConfigError: A setting that is unknown, of another type, or cannot work, with what would; before anything is
            allocated.
    """
    read = read_settings(settings)
    check_address_space()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of each optional package that is missing
        return _load(read)


def _load(settings: InferenceSettings) -> LoadedEngine:
    from megatron_ext.api.engine import LoadedEngine
    from megatron_ext.console.machine import check_machine
    from megatron_ext.console.start import say_start
    from megatron_ext.mcore.assemble import build_engine
    from megatron_ext.mcore.process_groups import PROCESS_GROUPS
    from megatron_ext.models.load import load_model, save_model
    from megatron_ext.models.update.naming import naming_of

    say_start(settings.start)
    _require_one_rank(check_machine(settings.parallel))
    PROCESS_GROUPS.enter(settings.parallel)
    try:
        loaded = load_model(settings.source, dict(settings.model_overrides), parallel=settings.parallel)
        if settings.source.save is not None:
            save_model(settings.source.save, loaded)
        engine = build_engine(
            loaded.model,
            loaded.config,
            loaded.tokenizer,
            settings.batching,
            settings.cache,
            dtype=loaded.dtype,
            seed=settings.source.seed,
            logging_step_interval=settings.run.inference_logging_step_interval,
        )
        naming = naming_of(settings.source, loaded.config)
        return LoadedEngine(engine, loaded, naming, settings.sampling, PROCESS_GROUPS.leave)
    except BaseException:
        PROCESS_GROUPS.leave()
        raise


def _require_one_rank(layout: Layout) -> None:
    if layout.world > 1:
        raise ConfigError(
            f"{layout.world} ranks were started, and load_engine runs on one in this version; "
            "give torchrun --nproc-per-node 1"
        )
