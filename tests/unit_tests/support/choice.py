"""Reference choice of the next token by docs/sampling.md, in Python's own numbers, one word after the other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from megatron_ext.config import RequestParams
from tests.unit_tests.support.oracle import Oracle

NEAR = 1e-5  # a number so close to a border may fall on either side of it


class NearBorderError(Exception):
    """Rounding decides: take another seed."""


def shaped(
    logits: Sequence[float], prompt: Sequence[int], generated: Sequence[int], params: RequestParams, bad: Sequence = ()
) -> list[float]:
    """Penalties, biases, words that must not come."""
    values = list(logits)
    for token in set(prompt) | set(generated):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(generated):
        values[token] -= params.frequency_penalty * list(generated).count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    for word in bad:
        head = list(word[:-1])
        if not head or list(generated[-len(head) :]) == head:
            values[word[-1]] = -math.inf
    return values


def line(values: Sequence[float], params: RequestParams) -> dict[int, float]:
    """Temperature, min_p, top_k, top_p: the tokens that can come and their probabilities, in order of their ids."""
    best = max(values)
    weights = {i: math.exp((value - best) / params.temperature) for i, value in enumerate(values)}
    kept = [i for i, weight in weights.items() if weight > 0]
    if params.min_p:
        assert all(abs(weights[i] - params.min_p) > 1e-6 for i in kept)
        kept = [i for i in kept if weights[i] >= params.min_p]
    kept.sort(key=lambda i: -values[i])
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p:
        total, before, chosen = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if before < params.top_p * total:
                chosen.append(i)
            before += weights[i]
        kept = chosen
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def log_probs(values: Sequence[float], params: RequestParams) -> list[float]:
    """Processed log-probs of all tokens; of logits without temperature and filters where the temperature is 0."""
    plain = RequestParams(temperature=1.0) if params.temperature == 0 else params
    found = line(values, plain)
    return [math.log(found[i]) if i in found else -math.inf for i in range(len(values))]


def choose(values: Sequence[float], params: RequestParams, uniform: float | None) -> int:
    """The token.

    Raises:
        NearBorderError: Two are so close that rounding may decide.
    """
    if params.is_greedy:
        best, second = sorted(values, reverse=True)[:2]
        if best - second < 1e-4:
            raise NearBorderError
        return list(values).index(best)
    reached = 0.0
    for token, probability in line(values, params).items():
        if abs(reached - uniform) < NEAR and reached > 0:
            raise NearBorderError
        reached += probability
        if uniform < reached:
            return token
    raise NearBorderError


def generate(
    oracle: Oracle, prompt: Sequence[int], params: RequestParams, bad: Sequence = (), ends: Sequence[int] = ()
) -> list[int]:
    """All tokens of a request with a seed of its own, each by a full forward over everything before it."""
    numbers, generated = random.Random(params.seed), []
    while len(generated) < params.num_tokens_to_generate:
        logits = oracle.logits([*prompt, *generated])[-1].tolist()
        uniform = None if params.is_greedy else numbers.random()
        generated.append(choose(shaped(logits, prompt, generated, params, bad), params, uniform))
        if generated[-1] in ends:
            break
    return generated
