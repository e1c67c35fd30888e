"""Prompts that are made up: random tokens, as many as come in a given time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config import RequestParams, RunConfig
from megatron_ext.config.run import DEFAULT_PROMPT_TOKENS


@dataclass(frozen=True)
class RandomTokens:
    """The content of a prompt that is made up when the vocabulary is known.

    Attributes:
        count: Tokens.
        seed: Of their choice.
    """

    count: int
    seed: str

    def draw(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens, out of those of a vocabulary."""
        return tuple(random.Random(self.seed).choices(ids, k=self.count))


def synthetic_contents(run: RunConfig, seed: int) -> list[RandomTokens]:
    """One for each prompt, of lengths that are evenly spread between the fewest and the most tokens."""
    fewest, most = run.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
    lengths = random.Random(seed)
    return [RandomTokens(lengths.randint(fewest, most), seed=f"{seed} {index}") for index in range(run.synthetic_count)]


def described(run: RunConfig, params: RequestParams) -> str:
    """What they are, in a line."""
    fewest, most = run.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
    return (
        f"{run.synthetic_count} synthetic prompts of {fewest} to {most} random tokens, "
        f"{params.num_tokens_to_generate} to generate each"
    )
