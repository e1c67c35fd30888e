"""Conversion of OpenAI's fields into the inputs of engine requests."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ext.config import RequestParams
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.request import MAX_CHECKPOINTS, ResponseFormat
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.server.api_errors import ApiError, ContextExceeded
from megatron_ext.server.api_keys import Caller
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.request_fields import GenerationRequest

if TYPE_CHECKING:
    from megatron_ext.server.serving import Serving

COMPLETION_TOKENS = 16  # OpenAI's default; a chat's is the model's, else as many as fit
TEMPERATURE = 1.0
# Fields of a body that are fields of `RequestParams`, too, with the same meaning. Choices have different seeds.
_SAME_NAMES = tuple(
    name
    for name in RequestParams.__dataclass_fields__
    if name in GenerationRequest.model_fields and name not in ("response_format", "seed")
)


def check_count(prompts: int, choices: int, limit: int) -> None:
    """Check that the server could ever accept this many requests, before any text is tokenized.

    Args:
        prompts: Prompts of one HTTP request.
        choices: Choices of each prompt.
        limit: Maximum number of engine requests at once.

    Raises:
        ApiError: There are more.
    """
    if prompts * choices <= limit:
        return
    asked = f"{prompts * choices} requests (prompts: {prompts}, n: {choices})"
    message = f"{asked}; this server accepts at most {limit} at once"
    raise ApiError(400, message, param="n" if prompts == 1 else "prompt")


def completion_inputs(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], serving: Serving, caller: Caller
) -> list[RequestInputs]:
    """Return the choices of each prompt, prompt by prompt.

    Args:
        body: Request.
        prompts: Token ids of its prompts.
        serving: Limits of the engine, and values of fields that the body leaves out.
        caller: Caller, to whom the cache salt is bound.

    Raises:
        ApiError: A sequence exceeds the limits.
        ConfigError: Values contradict each other.
    """
    echoes_scores = bool(body.echo) and body.logprobs is not None
    settings = _common(body, caller, serving.defaults) | _scores(body.logprobs, with_prompt=echoes_scores)
    count = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if count == 0 and not body.echo:
        message = (
            "max_tokens must be at least 1; 0 needs echo on /v1/completions, which returns the scores of the prompt"
        )
        raise ApiError(400, message, param="max_tokens")
    return [one for prompt in prompts for one in _choices(body, prompt, count, settings, serving.limits)]


def chat_inputs(
    body: ChatRequest,
    prompt: Sequence[int],
    serving: Serving,
    caller: Caller,
    response_format: ResponseFormat | None = None,
    marks: Sequence[int] = (),
    retokenized: tuple[int, int] | None = None,
) -> list[RequestInputs]:
    """Return the choices of a conversation.

    Args:
        body: Request.
        prompt: Tokens of the rendered conversation.
        serving: Limits of the engine, chat format of the model, and values of fields that the body leaves out.
        caller: Caller, to whom the cache salt is bound.
        response_format: Response format, in place of the body's own.
        marks: Positions of its `cache_control` marks in the prompt.
        retokenized: See `RequestInputs`.

    Raises:
        ApiError: A sequence exceeds the limits.
        ConfigError: Values contradict each other.
    """
    limits, chat, defaults = serving.limits, serving.chat_format, serving.defaults
    scores = _scores((body.top_logprobs or 0) if body.logprobs else None, with_prompt=False)
    settings = _common(body, caller, defaults) | scores
    settings["response_format"] = response_format or body.enforced_format
    checkpoints = (*settings.get("cache_checkpoint", ()), *marks, *chat.ends_of_turns(prompt))
    settings["cache_checkpoint"] = checkpoints[:MAX_CHECKPOINTS]
    if not body.ignore_eos:
        settings["termination_id"] = chat.end_of_turn
        settings["stop_token_ids"] = (*settings.get("stop_token_ids", ()), *chat.other_ends)
    if (body.max_calls and chat.calls_are_special) or chat.thinking_is_special:
        settings["skip_special_tokens"] = False
    rest = max(1, limits.max_model_len - len(prompt))
    rest = min(rest, defaults.get("num_tokens_to_generate") or rest)
    count = body.max_completion_tokens or body.max_tokens or rest
    return _choices(body, prompt, count, settings, limits, retokenized)


def _choices(
    body: GenerationRequest,
    prompt: Sequence[int],
    count: int,
    settings: FieldValues,
    limits: SchedulerLimits,
    retokenized: tuple[int, int] | None = None,
) -> list[RequestInputs]:
    length, limit = len(prompt), limits.max_model_len
    if length > limit or length + count > limits.max_sequence_length:
        excess = f"{length} tokens of prompt and {count} to generate are {length + count}; shorten the prompt"
        remedy, param = (f", or generate at most {limit - length}", "max_tokens") if length < limit else ("", None)
        raise ContextExceeded(excess + remedy, length, count, limit, param)
    seeds = [None if body.seed is None else body.seed + choice for choice in range(body.n or 1)]
    tokens = tuple(prompt)
    params = [RequestParams(**{**settings, "num_tokens_to_generate": count, "seed": seed}) for seed in seeds]
    # Only the first choice returns the prompt's data; the others need not compute it again.
    others = [dataclasses.replace(one, skip_prompt_log_probs=one.return_log_probs) for one in params[1:]]
    return [RequestInputs(tokens, one, retokenized=retokenized) for one in (*params[:1], *others)]


def _common(body: GenerationRequest, caller: Caller, defaults: FieldValues) -> dict[str, Any]:
    """Return the fields of `RequestParams` that both routes share: from the body, else the model's defaults.

    OpenAI's top_p 0 is greedy and 1 is off, vLLM's top_k -1 is off; the engine's 0 is off for both.
    """
    given = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    settings: dict[str, Any] = {"temperature": TEMPERATURE, **defaults, **given}
    if "top_k" in settings:
        settings["top_k"] = min(max(0, settings["top_k"]), sys.maxsize)
    if body.top_p == 0:
        settings["top_k"] = 1
    if settings.get("top_p") == 1:
        settings["top_p"] = 0.0
    salt = caller.bind(settings.get("cache_salt"))
    return settings | {"response_format": body.enforced_format, "stop_words": body.stop_words, "cache_salt": salt}


def _scores(best: int | None, *, with_prompt: bool) -> dict[str, Any]:
    """Return the log-prob fields, with `best` alternatives; None for no log-probs."""
    if best is None:
        return {}
    return {"return_log_probs": True, "skip_prompt_log_probs": not with_prompt, "top_n_logprobs": best}
