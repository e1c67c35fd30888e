"""YaRN in a decoded `config.json`: rotary parameters translated to the fields of `ModelConfig`."""

from __future__ import annotations

import math

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, flag, names, positive_number, size, size_or

YARN = "yarn"
YARN_KEYS = names(
    """
    factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate
    """
)
# transformers' defaults of null, zero or absent values; also ours.
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def yarn_fields(parameters: Fields, name: str, fields: Fields) -> dict[str, object]:
    """Return the fields of `ModelConfig` that begin with `yarn_`.

    Args:
        parameters: Rotary parameters, each key with the object's name as prefix: `rope_scaling.factor`.
        name: Name of the object.
        fields: The whole file; its maximum length is the default of the original one.

    Raises:
        ConfigError: A value has the wrong type or range.
    """
    key = f"{name}.original_max_position_embeddings"
    factor = positive_number(parameters, f"{name}.factor")
    if factor < 1:
        raise ConfigError(f"config.json: {name}.factor = {factor!r} is not supported; it must be 1 or more")
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": size_or(parameters, key, size(fields, "max_position_embeddings")),
        **{f"yarn_{beta}": _number_or(parameters, f"{name}.{beta}", default) for beta, default in _BETAS.items()},
        "yarn_correction_range_round_to_int": flag(parameters, f"{name}.truncate", default=True),
        **_scales(parameters, name, factor),
    }


def _number_or(parameters: Fields, key: str, default: float) -> float:
    return positive_number(parameters, key) if parameters.get(key) else default


def _scales(parameters: Fields, name: str, factor: float) -> dict[str, object]:
    """Return two scales that yield the requested magnitude, see `ModelConfig.rotary_magnitude`."""
    magnitude, both = f"{name}.attention_factor", (f"{name}.mscale", f"{name}.mscale_all_dim")
    if parameters.get(magnitude) is not None:
        asked = positive_number(parameters, magnitude)
        if factor == 1 and asked != 1:
            raise ConfigError(
                f"config.json: {magnitude} = {asked!r} is not supported with {name}.factor = 1; supported is 1"
            )
        scale = (asked - 1) / (0.1 * math.log(factor)) if factor > 1 else 1.0
        return {"yarn_mscale": scale, "yarn_mscale_all_dim": 0.0}
    if not all(parameters.get(key) for key in both):
        return {}
    numerator, denominator = (positive_number(parameters, key) for key in both)
    return {"yarn_mscale": numerator, "yarn_mscale_all_dim": denominator}
