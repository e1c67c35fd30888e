"""Prompts of one `generate` call, from their submission to their results."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.mcore import platform
from megatron_ext.mcore.inference_request import DynamicInferenceRequest, RequestConversion
from megatron_ext.mcore.sampling_params import to_request_params
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.scheduling.request_inputs import RequestInputs

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | list[int]


class Generation:
    """Submitted prompts; their requests are aborted if the wait for them is interrupted.

    Args:
        client: Client of the engine, which gets the requests at once.
        requests: Requests of the engine.
        params: Parameters as the caller gave them.
        conversion: Conversion of records.

    Raises:
        EngineClosed: The engine is closed.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineRequest],
        params: SamplingParams,
        conversion: RequestConversion,
    ) -> None:
        self._client = client
        self._requests = requests
        self._params = params
        self._conversion = conversion
        self._submitted = client.submit(requests)

    def wait(self) -> list[DynamicInferenceRequest]:
        """Wait for the end of all requests, and return them in the order of the prompts.

        Raises:
            ConfigError: A prompt or the parameters are invalid. None of the prompts is served.
            EngineSuspended: The engine is suspended.
            EngineClosed: The engine was closed meanwhile.
        """
        try:
            self._submitted.result()
            for one in self._requests:
                one.record.result()
        except BaseException:
            self._client.abort(self._requests)
            raise
        return self._results()

    async def wait_in_loop(self) -> list[DynamicInferenceRequest]:
        """Wait as `wait`, without blocking the event loop."""
        try:
            await asyncio.wrap_future(self._submitted)
            for one in self._requests:
                await asyncio.wrap_future(one.record)
        except BaseException:
            self._client.abort(self._requests)
            raise
        return await asyncio.to_thread(self._results)

    def _results(self) -> list[DynamicInferenceRequest]:
        return [
            self._conversion.convert(one.record.result(), self._params, one.inputs.params.num_tokens_to_generate)
            for one in self._requests
        ]


def conversion_for(engine: LLMEngine, *, has_pause_events: bool) -> RequestConversion:
    """Return the conversion of an engine's records.

    Args:
        engine: The engine.
        has_pause_events: Whether events include pauses.
    """
    return RequestConversion(
        detokenize=engine.vocabulary.detokenize,
        eod=engine.tokenizer.eod,
        block_size=engine.limits.block_size,
        is_caching=engine.is_caching,
        device=platform.device(),
        has_pause_events=has_pause_events,
    )


def make_requests(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    tokenize: Callable[[Prompt, bool], tuple[int, ...]],
    max_sequence_length: int,
    *,
    has_token_events: bool,
) -> list[EngineRequest]:
    """Return requests for prompts that share their parameters.

    A number of tokens to generate that exceeds the maximum length is reduced, with a warning, as in Megatron.

    Args:
        prompts: Texts or token ids.
        params: Parameters of all prompts.
        tokenize: Function from a prompt, and whether to prepend the BOS token, to token ids.
        max_sequence_length: Maximum number of tokens of a request, prompt included.
        has_token_events: Whether requests record an event for each generated token.

    Raises:
        ConfigError: A prompt or a parameter is invalid.
    """
    requests = []
    for index, prompt in enumerate(prompts):
        tokens = tokenize(prompt, params.add_BOS)
        ours = to_request_params(params, len(tokens), max_sequence_length)
        room = max_sequence_length - len(tokens)
        if 0 <= room < ours.num_tokens_to_generate:
            logger.warning(
                "prompt %d of %d tokens leaves room for %d generated tokens, not for %d",
                index,
                len(tokens),
                room,
                ours.num_tokens_to_generate,
            )
            ours = dataclasses.replace(ours, num_tokens_to_generate=room)
        if has_token_events:
            ours = dataclasses.replace(ours, track_generated_token_events=True)
        requests.append(EngineRequest(RequestInputs(tokens, ours, prompt if isinstance(prompt, str) else None)))
    return requests


def listed(prompts: object) -> tuple[list[Prompt], bool]:
    """Return a list of prompts, and whether there may be several; a list of numbers is one prompt.

    Raises:
        TypeError: The value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts], False
    if not isinstance(prompts, list):
        raise TypeError(f"prompts are of type {type(prompts).__name__}; give a text, a list of token ids, or several")
    if prompts and isinstance(prompts[0], int):
        return [prompts], False
    wrong = next((one for one in prompts if not isinstance(one, str | list)), None)
    if wrong is not None:
        raise TypeError(f"a prompt is of type {type(wrong).__name__}; give a text or a list of token ids")
    return prompts, True
