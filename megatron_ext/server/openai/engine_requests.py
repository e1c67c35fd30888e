"""Conversion of OpenAI fields into the engine's request parameters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_ext.config import RequestParams
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.request import MAX_CHECKPOINTS
from megatron_ext.config.token_biases import NO_BIASES
from megatron_ext.server.api_errors import context_exceeded, generates_nothing, too_many_requests
from megatron_ext.server.openai.chat import ChatFormat
from megatron_ext.server.openai.protocol import ChatRequest, CompletionRequest
from megatron_ext.server.openai.request_fields import GenerationRequest

COMPLETION_TOKENS = 16  # OpenAI's default; a chat's is as many as fit
TEMPERATURE = 1.0
NOTHING: FieldValues = MappingProxyType({})


@dataclass(frozen=True)
class RequestSpec:
    """Engine request: one choice of one prompt."""

    tokens: tuple[int, ...]
    params: RequestParams


@dataclass(frozen=True)
class PromptLimits:
    """Maximum sequence lengths in tokens: the engine's limit, and the capacity of the KV pool."""

    sequence: int
    pool: int


def check_count(prompts: int, choices: int, most: int) -> None:
    """Check that the server could ever accept this many requests, before any text is tokenized.

    Args:
        prompts: Prompts of one HTTP request.
        choices: Choices of each prompt.
        most: Maximum number of engine requests at once.

    Raises:
        ApiError: There are more.
    """
    if prompts * choices > most:
        raise too_many_requests(prompts, choices, most)


def completion_specs(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], limits: PromptLimits, defaults: FieldValues = NOTHING
) -> list[RequestSpec]:
    """Return the choices of each prompt, prompt by prompt; `defaults` replace fields that the body leaves out.

    Raises:
        ApiError: A sequence exceeds the limits.
        ConfigError: Values contradict each other.
    """
    echoes_scores = bool(body.echo) and body.logprobs is not None
    settings = _common(body, defaults) | _scores(body.logprobs, with_prompt=echoes_scores)
    count = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if count == 0 and not body.echo:
        raise generates_nothing()
    return [spec for prompt in prompts for spec in _specs(body, prompt, count, settings, limits)]


def chat_specs(
    body: ChatRequest, prompt: Sequence[int], limits: PromptLimits, chat: ChatFormat, defaults: FieldValues = NOTHING
) -> list[RequestSpec]:
    """Return the choices of a conversation; `defaults` replace fields that the body leaves out.

    Raises:
        ApiError: A sequence exceeds the limits.
        ConfigError: Values contradict each other.
    """
    settings = _common(body, defaults) | _scores((body.top_logprobs or 0) if body.logprobs else None, with_prompt=False)
    settings["cache_checkpoint"] = (*settings["cache_checkpoint"], *chat.ends_of_turns(prompt))[:MAX_CHECKPOINTS]
    if not body.ignore_eos:
        settings["termination_id"] = chat.end_of_turn
        settings["stop_token_ids"] += chat.other_ends
    if body.max_calls and chat.calls_are_special:
        settings["skip_special_tokens"] = False
    rest = max(1, min(limits.sequence, limits.pool) - len(prompt))
    return _specs(body, prompt, body.max_completion_tokens or body.max_tokens or rest, settings, limits)


def _specs(
    body: GenerationRequest, prompt: Sequence[int], count: int, settings: FieldValues, limits: PromptLimits
) -> list[RequestSpec]:
    if len(prompt) + count > limits.sequence:
        raise context_exceeded(len(prompt), count, limits.sequence)
    seeds = [None if body.seed is None else body.seed + choice for choice in range(body.n or 1)]
    tokens = tuple(prompt)
    params = [RequestParams(num_tokens_to_generate=count, seed=seed, **settings) for seed in seeds]
    # Only the first choice returns the prompt's data; the others need not compute it again.
    others = [dataclasses.replace(one, skip_prompt_log_probs=one.return_log_probs) for one in params[1:]]
    return [RequestSpec(tokens, one) for one in (*params[:1], *others)]


def _common(body: GenerationRequest, defaults: FieldValues) -> dict[str, Any]:
    """Return the fields of `RequestParams` that both routes share."""
    return {
        **_choice(body, defaults),
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": body.logit_bias or NO_BIASES,
        "response_format": body.form,
        "bad_words": tuple(body.bad_words or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "min_tokens": body.min_tokens or 0,
        "stop_words": body.stop_words,
        "ignore_eos": bool(body.ignore_eos),
        "cache_salt": body.cache_salt,
        "cache_checkpoint": tuple(body.cache_checkpoint or ()),
        "enable_prefix_caching": body.enable_prefix_caching is not False,
        "num_speculative_tokens": body.num_speculative_tokens,
    }


def _choice(body: GenerationRequest, defaults: FieldValues) -> dict[str, Any]:
    """Return sampling fields with model defaults. OpenAI's top_p 0 is greedy and 1 is off; the engine's 0 is off."""

    def said(name: str, otherwise: float) -> Any:
        value = getattr(body, name)
        return defaults.get(name, otherwise) if value is None else value

    top_k, top_p = min(max(0, said("top_k", 0)), sys.maxsize), said("top_p", 0.0)
    return {
        "temperature": said("temperature", TEMPERATURE),
        "top_k": 1 if body.top_p == 0 else top_k,
        "top_p": 0.0 if top_p == 1 else float(top_p),
        "min_p": said("min_p", 0.0),
        "repetition_penalty": said("repetition_penalty", 1.0),
    }


def _scores(best: int | None, *, with_prompt: bool) -> dict[str, Any]:
    """Return the log-prob fields, with `best` alternatives; None for no log-probs."""
    if best is None:
        return {}
    return {"return_log_probs": True, "skip_prompt_log_probs": not with_prompt, "top_n_logprobs": best}
