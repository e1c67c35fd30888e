"""From what a caller hands in to a request: everything about it that can be refused at the door."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.params import to_request_params
from megatron_ext.scheduling.request import Request


class Intake:
    """Makes requests, and counts them.

    Args:
        controller: Has the tokenizer.
        max_sequence_length: Of the engine, tokens.
        random_seed: Requests without a seed of their own get one derived from it and their id.
    """

    def __init__(self, controller: InferenceController, max_sequence_length: int, random_seed: int) -> None:
        self._controller = controller
        self._max_sequence_length = max_sequence_length
        self._random_seed = random_seed
        self._next_arrival = 0

    def make(
        self,
        request_id: int,
        prompt: str | Sequence[int] | torch.Tensor,
        sampling_params: RequestParams | SamplingParams | None,
    ) -> Request:
        """A request of a text or of token ids.

        Raises:
            ConfigError: The prompt or the parameters make no sense, whatever the engine's limits.
        """
        tokens = self._tokenize(prompt, getattr(sampling_params, "add_BOS", False))
        params = to_request_params(sampling_params, len(tokens), self._max_sequence_length)
        termination = self._controller.tokenizer.eod if params.termination_id is None else params.termination_id
        request = Request(
            request_id=request_id,
            prompt_tokens=tokens,
            params=params,
            arrival=self._next_arrival,
            seed=params.seed if params.seed is not None else f"{self._random_seed}/{request_id}",
            termination_id=None if params.ignore_eos else termination,
            prompt_text=prompt if isinstance(prompt, str) else None,
        )
        self._next_arrival += 1
        return request

    def _tokenize(self, prompt: str | Sequence[int] | torch.Tensor, add_bos: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            prompt = self._controller.tokenize_prompt(prompt, add_bos)
        tokens = tuple(int(token) for token in (prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt))
        if not tokens:
            raise ConfigError("the prompt is empty; it needs at least one token")
        self._controller.vocabulary.check_prompt(tokens)
        return tokens
