"""Conversion of Megatron's `SamplingParams` to `RequestParams`."""

from __future__ import annotations

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError

# Fields that callers may add to Megatron's class with `add_attributes`; same names as ours.
_EXTENSIONS = tuple(
    name for name in RequestParams.__dataclass_fields__ if name not in SamplingParams.__dataclass_fields__
)


def to_request_params(
    params: SamplingParams | RequestParams | None, prompt_length: int, max_sequence_length: int
) -> RequestParams:
    """Convert the parameters; `num_tokens_total`, or no length at all, becomes a number of tokens to generate.

    Raises:
        ConfigError: Invalid values.
    """
    if params is None:
        return RequestParams()
    if isinstance(params, RequestParams):
        return params
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
    extensions = {name: getattr(params, name) for name in _EXTENSIONS if hasattr(params, name)}
    stop_words = params.stop_words or ()
    return RequestParams(
        num_tokens_to_generate=count,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        stop_words=(
            # `RequestParams` refuses a single string
            stop_words if isinstance(stop_words, str) else tuple(stop_words)  # type: ignore[arg-type]
        ),
        termination_id=params.termination_id,
        return_log_probs=params.return_log_probs,
        skip_prompt_log_probs=params.skip_prompt_log_probs,
        top_n_logprobs=params.top_n_logprobs,
        **extensions,
    )
