"""Checks of the paths that flags name, before torch is imported, which takes seconds.

The same checks come again where the paths are used; there the ranks of a world have met and end together.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ext.config import CacheConfig, InferenceSettings, ServerSettings, SourceConfig
from megatron_ext.config.model_folder import require_model_folder
from megatron_ext.console.start import check_profile
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import FIXED_IN_ALL, read_fields
from megatron_ext.models.new_directory import require_place
from megatron_ext.offline.output_file import check_output_paths
from megatron_ext.offline.prompts import check_prompt_file
from megatron_ext.parallel.world import world_of_environment
from megatron_ext.prefix_cache.disk.slot import DiskUnavailableError, prepare_directory, unusable
from megatron_ext.server.api_keys import load_keys
from megatron_ext.text.tokenizer_files import read_template_file


def check_paths(settings: InferenceSettings | ServerSettings) -> None:
    """Check the paths of a process that runs alone, and create the directory of the cache."""
    if world_of_environment().size > 1:
        return
    _check_source(settings.source)
    _check_cache(settings.cache)
    if isinstance(settings, ServerSettings):
        load_keys(settings.server)
        check_profile(settings.server.profile, None)
    else:
        check_prompt_file(settings.run)
        check_output_paths(settings.run)
        check_profile(settings.run.profile, None)


def _check_source(source: SourceConfig) -> None:
    for flag, given in (("--load", source.load), ("--load-hf", source.load_hf)):
        if given is not None:
            folder = require_model_folder(flag, given)
            if flag == "--load-hf":
                read_fields(folder, source.hf_overrides).check(FIXED_IN_ALL)
    if source.chat_template is not None:
        read_template_file(Path(source.chat_template))
    if source.save is not None:
        try:
            require_place(Path(source.save).resolve())
        except OSError as error:
            raise ConfigError(f"--save {source.save} cannot be written: {error}") from None


def _check_cache(cache: CacheConfig) -> None:
    if cache.is_durable and not cache.prefix_cache_dir_optional:
        assert cache.prefix_cache_dir is not None, "it is durable"
        try:
            prepare_directory(Path(cache.prefix_cache_dir))
        except DiskUnavailableError as error:
            raise unusable(error) from None
