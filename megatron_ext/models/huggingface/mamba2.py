"""Mamba-2 fields of a decoded `config.json`, under the names of Bamba and related families."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, check_divides, names, size, size_or

MAMBA2_SIZES: Mapping[str, str] = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "mamba_num_groups",
    "mamba_d_state": "mamba_state_dim",
    "mamba_d_conv": "mamba_conv_kernel",
    "mamba_chunk_size": "mamba_chunk_size",
}
MAMBA2_DEFAULTS: Fields = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 256,
}
TIME_STEP_LIMIT: Mapping[str, tuple[object, ...]] = {"time_step_limit": ((0.0, math.inf),)}
MAMBA2_FIXED: Mapping[str, tuple[object, ...]] = {
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    **TIME_STEP_LIMIT,
}
MAMBA2_READ = names("mamba_d_head mamba_expand")
_DEFAULT_EXPAND = 2


def mamba2_heads(fields: Fields, width: int | None = None) -> dict[str, object]:
    """Return the head size, from `mamba_d_head` or the width of the layer.

    Args:
        fields: A decoded `config.json`.
        width: Width of the layer; default: `mamba_expand` times the hidden size.

    Raises:
        ConfigError: The heads do not make up the width, or the groups do not divide the heads.
    """
    check_divides(fields, "mamba_n_groups", "mamba_n_heads")
    if width is None:
        width = size_or(fields, "mamba_expand", _DEFAULT_EXPAND) * size(fields, "hidden_size")
    heads = size(fields, "mamba_n_heads")
    channels = width // heads if fields.get("mamba_d_head", "auto") == "auto" else size(fields, "mamba_d_head")
    if channels * heads != width:
        raise ConfigError(
            f"config.json: mamba_n_heads = {heads} of mamba_d_head = {channels} do not make up the {width} channels of "
            "a Mamba layer"
        )
    return {"mamba_head_dim": channels}
