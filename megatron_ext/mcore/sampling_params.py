"""Conversion of Megatron's `SamplingParams` to `RequestParams`."""

from __future__ import annotations

import dataclasses

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError

# Fields of Megatron's class, of this version or a newer one, that become fields of ours under another name or type.
_CONVERTED = frozenset({"num_tokens_to_generate", "num_tokens_total", "stop_words"})
# Fields that other code honours: `add_BOS` comes before the conversion; records always have the prompt's tokens; the
# deprecated one follows from two others, and an interval means nothing without streaming.
_HONOURED_ELSEWHERE = frozenset(
    {"add_BOS", "return_prompt_tokens", "return_prompt_top_n_logprobs", "streaming_interval"}
)
# Fields that are refused if they are set, each with the remedy.
_REFUSED = {
    "return_segments": "texts of single tokens are not returned; leave it out",
    "streaming": "results are returned whole; leave it out, and stream from the server or from LoadedEngine.stream()",
}
_COPIED = frozenset(RequestParams.__dataclass_fields__) - _CONVERTED  # fields of ours, also by `add_attributes`


def default_of(one: dataclasses.Field[object]) -> object:
    """Return the default of a dataclass's field; `MISSING` without one."""
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


def check_known(params: SamplingParams) -> None:
    """Check that every field, and every attribute that a caller has added, is honoured or has its default.

    Raises:
        ConfigError: One does not; names it.
    """
    defaults = {one.name: default_of(one) for one in dataclasses.fields(params)}  # of a newer version, too
    known = _COPIED | _CONVERTED | _HONOURED_ELSEWHERE
    for name, value in vars(params).items():
        if name in _REFUSED:
            if value:
                raise ConfigError(f"{name} {value!r}: {_REFUSED[name]}")
        elif name not in known and value != defaults.get(name, dataclasses.MISSING):
            raise ConfigError(f"{name} {value!r} is not a sampling parameter here; leave it out")


def to_request_params(
    params: SamplingParams | RequestParams | None, prompt_length: int, max_sequence_length: int
) -> RequestParams:
    """Convert the parameters; `num_tokens_total`, or no length at all, becomes a number of tokens to generate.

    Raises:
        ConfigError: Invalid values, or a field that is not honoured.
    """
    if params is None:
        return RequestParams()
    if isinstance(params, RequestParams):
        return params
    check_known(params)
    count = params.num_tokens_to_generate
    if params.num_tokens_total is not None:
        if count is not None:
            raise ConfigError(
                f"num_tokens_total {params.num_tokens_total} and num_tokens_to_generate {count} contradict each other; "
                "set one of them to None"
            )
        count = params.num_tokens_total - prompt_length
        if count < 1:
            raise ConfigError(
                f"num_tokens_total {params.num_tokens_total} leaves no token to generate after a prompt of "
                f"{prompt_length} tokens; give at least {prompt_length + 1}"
            )
    if count is None:  # as many as fit; the engine's limits refuse a prompt that leaves no room
        count = max(1, max_sequence_length - prompt_length)
    copied = {name: value for name, value in vars(params).items() if name in _COPIED}
    stop_words = params.stop_words or ()
    return RequestParams(
        num_tokens_to_generate=count,
        stop_words=(
            # `RequestParams` refuses a single string
            stop_words if isinstance(stop_words, str) else tuple(stop_words)  # type: ignore[arg-type]
        ),
        **copied,
    )
