"""8-bit computation of Megatron-LM: its flags are accepted only if they are to mean 16 bits."""

from __future__ import annotations

from arguments.megatron.flag_table import records
from arguments.parsed_flags import ParsedFlags
from megatron_ext.errors import ConfigError

_KEY = "fp8-as-16bit"


def require_16_bits(given: ParsedFlags) -> None:
    """Refuse flags of 8-bit computation unless `--fp8-as-16bit` is given; with it, set the type of 16 bits, in place.

    The flags come from both the command line and the file.

    Raises:
        ConfigError: A flag of 8-bit computation without `--fp8-as-16bit`.
    """
    is_accepted = given.values.pop(_KEY, False)
    found = [flag for flag in records() if flag.unless and flag.name in given.without_effect.options]
    if not is_accepted:
        for flag in found:
            raise ConfigError(f"{flag.name} is refused: {flag.why}")
    elif not found:
        given.without_effect.note(f"--{_KEY}")
    else:
        is_fp16 = given.values.get("fp16") or given.values.get("dtype") == "float16"
        if not is_fp16:
            given.values["bf16"] = True
        kind = "fp16" if is_fp16 else "bf16"
        names = ", ".join(flag.name for flag in found)
        given.without_effect.warnings.append(
            f"--{_KEY}: {names}: nothing is computed in 8 bits; parameters and products of all layers are in {kind}, "
            "so log-probs differ from 8-bit results"
        )
