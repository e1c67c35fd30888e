"""Flags of Megatron-LM that are synonyms of this package's flags, or mean 8 bits, which are 16 here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arguments.flags import FlagGroup, normalize_key
from arguments.megatron.flag_table import records
from arguments.megatron.layer_flags import CHECKPOINTS
from arguments.parsed_flags import ParsedFlags
from megatron_ext.config.options import option
from megatron_ext.config.server import MEGATRONS_PARSERS, from_megatrons_parsers
from megatron_ext.errors import ConfigError

_MAX_REQUESTS = "inference-dynamic-batching-max-requests"
# Flags that mean another one, unless that is given, too.
_FALLBACKS = {"pretrained-checkpoint": "load", f"{_MAX_REQUESTS}-override": _MAX_REQUESTS}

_FP8_KEY = "fp8-as-16bit"


@dataclass(frozen=True)
class Synonyms:
    """Values of the synonyms, translated into this package's flags by `translate`."""

    pretrained_checkpoint: str | None = option(None, "Checkpoint to load if --load is not given", metavar="DIR")
    disable_chunked_prefill: bool = option(False, "--no-enable-chunked-prefill")
    use_rotary_position_embeddings: bool = option(False, "--position-embedding-type rope")
    hybrid_attention_ratio: float = option(
        0.0, "Fraction of --num-layers that are attention layers, evenly spaced; instead of a pattern"
    )
    hybrid_mlp_ratio: float = option(0.0, "Fraction of --num-layers that are MLP layers, likewise")
    max_requests_override: int | None = option(
        None, f"--{_MAX_REQUESTS} if that is not given; Megatron's older name", flag=f"--{_MAX_REQUESTS}-override"
    )
    fp8_as_16bit: bool = option(
        False, "Accept Megatron's flags of 8-bit computation, and compute in bf16 (or --fp16) instead"
    )
    window_size: str | None = option(
        None, "Tokens before and after its own that attention sees: 127,0 is --attention-window 128"
    )
    parsers: tuple[str, ...] = option(
        (), f"--reasoning-parser and --tool-call-parser of a server: {', '.join(MEGATRONS_PARSERS)}"
    )
    rl_inference_parsers: tuple[str, ...] = option((), "--parsers, of Megatron's training with reinforcement learning")


SYNONYMS = FlagGroup("Megatron's synonyms of other flags", Synonyms)
# Equivalent of each flag that is given as true: (key, value).
_MEANINGS: Mapping[str, tuple[str, Any]] = {
    "disable-chunked-prefill": ("enable-chunked-prefill", False),
    "use-rotary-position-embeddings": ("position-embedding-type", "rope"),
}
# Megatron's own layer specs of hybrid models, replaced by this package's.
_STACKS = {("mamba_layer_specs", "mamba_stack_spec"), ("hybrid_layer_specs", "hybrid_stack_spec")}


def translate(given: ParsedFlags) -> ParsedFlags:
    """Translate synonyms into this package's flags, in one source: a command line or a file.

    Raises:
        ConfigError: Two flags contradict each other.
    """
    values = dict(given.values)
    _name_parsers(values)
    for key, (ours, value) in _MEANINGS.items():
        if values.pop(key, False):
            if values.get(ours, value) != value:
                raise ConfigError(f"--{key} and --{ours} contradict each other; give one of them")
            values[ours], given.typed[ours] = value, f"--{key}"
    for key, ours in _FALLBACKS.items():
        if key in values:
            fallback = values.pop(key)
            if values.setdefault(ours, fallback) is not fallback:
                given.without_effect.note(f"--{key}")
    if _is_megatrons_stack(values.get("spec")):
        del values["spec"]
    return dataclasses.replace(given, values=values)


def _name_parsers(values: dict[str, Any]) -> None:
    """Replace Megatron's names of parsers, in place."""
    for flag in ("parsers", "rl-inference-parsers"):
        parsers = values.pop(flag, ())
        assert isinstance(parsers, tuple), "of texts, as its field"
        for field, parser in from_megatrons_parsers(parsers).items():
            key = normalize_key(field)
            if values.setdefault(key, parser) != parser:
                raise ConfigError(f"--{flag} and --{key} {values[key]} contradict each other; give one of them")


def without_checkpoint(given: ParsedFlags) -> None:
    """Remove checkpoints and tokenizers with an empty name, in place; some flags have no effect without a checkpoint.

    The flags come from both the command line and the file: `--load ''` is a run without the file's checkpoint.
    """
    for key in (*CHECKPOINTS, "tokenizer-model"):
        if given.values.get(key) == "":
            del given.values[key]
    if not CHECKPOINTS & given.values.keys():
        for key in ("use-checkpoint-args", "override-checkpoint-args"):
            if given.values.pop(key, False):
                given.without_effect.note(f"--{key}")


def _is_megatrons_stack(spec: object) -> bool:
    if not isinstance(spec, tuple):
        return False
    module, name = spec
    return module.startswith("megatron.") and (module.rpartition(".")[2], name) in _STACKS


def require_16_bits(given: ParsedFlags) -> None:
    """Refuse flags of 8-bit computation unless `--fp8-as-16bit` is given; with it, set the type of 16 bits, in place.

    The flags come from both the command line and the file.
    """
    is_accepted = given.values.pop(_FP8_KEY, False)
    found = [flag for flag in records() if flag.unless and flag.name in given.without_effect.options]
    if not is_accepted:
        for flag in found:
            raise ConfigError(f"{flag.name} is refused: {flag.why}")
    elif not found:
        given.without_effect.note(f"--{_FP8_KEY}")
    else:
        is_fp16 = given.values.get("fp16") or given.values.get("dtype") == "float16"
        if not is_fp16:
            given.values["bf16"] = True
        kind = "fp16" if is_fp16 else "bf16"
        names = ", ".join(flag.name for flag in found)
        given.without_effect.warnings.append(
            f"--{_FP8_KEY}: {names}: nothing is computed in 8 bits; parameters and products of all layers are in "
            f"{kind}, so log-probs differ from 8-bit results"
        )
