"""Synthetic prompts: random tokens, with a rate of arrivals."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.config.run import DEFAULT_PROMPT_TOKENS


@dataclass(frozen=True)
class RandomTokens:
    """Content of a synthetic prompt, drawn when the vocabulary is known.

    Attributes:
        count: Number of tokens.
        seed: Seed of the tokens.
    """

    count: int
    seed: str

    def draw(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens, drawn from a vocabulary's ids."""
        return tuple(random.Random(self.seed).choices(ids, k=self.count))


def synthetic_contents(run: RunConfig, seed: int) -> list[RandomTokens]:
    """Return random prompt contents, with lengths uniform between the minimum and the maximum."""
    shortest, longest = run.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
    lengths = random.Random(seed)
    return [
        RandomTokens(lengths.randint(shortest, longest), seed=f"{seed} {index}") for index in range(run.synthetic_count)
    ]


def described(run: RunConfig, params: RequestParams) -> str:
    """Return a one-line description of the prompts."""
    shortest, longest = run.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
    return (
        f"{run.synthetic_count} synthetic prompts of {shortest} to {longest} random tokens, "
        f"{params.num_tokens_to_generate} to generate each"
    )
