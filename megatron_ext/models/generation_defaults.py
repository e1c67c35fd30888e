"""Sampling defaults of a model from `generation_config.json`, for requests that do not set them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megatron_ext.config import RequestParams, SourceConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.options import options_of
from megatron_ext.config.source import AUTO_GENERATION_CONFIG, NO_GENERATION_CONFIG
from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json
from megatron_ext.models.megatron.dist_checkpoint import resolve_iteration
from megatron_ext.text.tokenizer_files import GENERATION_FILE

logger = logging.getLogger(__name__)

# The same names in both.
_FIELDS = tuple(name for name, declared in options_of(RequestParams).items() if declared.in_generation_config)


def generation_defaults(source: SourceConfig, *, on_server: bool = False) -> FieldValues:
    """Return the `RequestParams` fields of the model's file, and log them, if `--generation-config` is auto.

    `do_sample` false is greedy, and true without a temperature is temperature 1, as in transformers. A `top_k` of -1 is
    off, as in vLLM.

    Args:
        on_server: Whether auto is the default, and `max_new_tokens` is taken as well.
    """
    directory = source.load_hf or source.load
    choice = source.generation_config or (AUTO_GENERATION_CONFIG if on_server else NO_GENERATION_CONFIG)
    if choice != AUTO_GENERATION_CONFIG or directory is None:
        return {}
    file = _file(Path(directory), is_ours=source.load is not None)
    if file is None:
        logger.info("sampling defaults: none, for %s has no %s", directory, GENERATION_FILE)
        return {}
    listed = read_json(file)
    values: dict[str, Any] = {name: listed[name] for name in _FIELDS if listed.get(name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if on_server and listed.get("max_new_tokens") is not None:
        values["num_tokens_to_generate"] = listed["max_new_tokens"]
    if listed.get("do_sample") is False:
        values["temperature"] = 0.0
    elif listed.get("do_sample") is True:
        values.setdefault("temperature", 1.0)
    try:
        RequestParams(**values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; --generation-config none ignores the file") from None
    shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
    logger.info("sampling defaults from %s: %s", file, shown or "none")
    return values


def request_defaults(source: SourceConfig, given: FieldValues) -> RequestParams:
    """Return the default parameters of requests: from flags, else from the model's generation config.

    Raises:
        ConfigError: Invalid values.
    """
    return RequestParams(**{**generation_defaults(source), **given})


def _file(directory: Path, *, is_ours: bool) -> Path | None:
    """Find the file beside the weights, or in the folder above them, beside all iterations."""
    places = [directory]
    if is_ours and not os.path.lexists(directory / GENERATION_FILE) and directory.is_dir():
        places.append(resolve_iteration(directory))
    return next((place / GENERATION_FILE for place in places if os.path.lexists(place / GENERATION_FILE)), None)
