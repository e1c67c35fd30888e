"""Tokens and scores of an eager step, from its logits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_ext.engine.result import Score, StepResult
from megatron_ext.errors import describe
from megatron_ext.memory.host_limits import is_out_of_memory
from megatron_ext.memory.pools import LogProbPool
from megatron_ext.ops.varlen import to_device
from megatron_ext.runner.kept_log_probs import exchange_states, keep_log_probs, read_log_probs
from megatron_ext.runner.model_input import ModelInput, PromptScore, SamplingRow
from megatron_ext.runner.sampler import eager_processed_logits, eager_sampler_input, sample, score_rows


def scored_states(hidden_states: Tensor, step: ModelInput, pool: LogProbPool | None) -> Tensor | None:
    """Return the output layer's input [k, h] at scored tokens, of which some may be kept; None without scores.

    Args:
        hidden_states: Input of the output layer at the step's packed tokens, [T, h].
        step: The step.
        pool: Log-probs kept with blocks; None if none are kept.
    """
    if not step.prompt_scores:
        return None
    states = hidden_states[step.score_tokens]
    if step.kept_log_probs is not None:
        assert pool is not None, "log-probs are kept"
        exchange_states(states, hidden_states, step.kept_log_probs, pool)
    return states


def sample_and_score(
    logits: Tensor,
    step: ModelInput,
    scored_logits: Callable[[slice], Tensor],
    *,
    pool: LogProbPool | None = None,
    is_alone: bool = True,
    is_processed: bool = False,
) -> StepResult:
    """Sample and score. A scoring that runs out of memory fails only the request that asked for the scores.

    Args:
        logits: [m, V], rows as in `step.sample_tokens`.
        step: The computed step.
        scored_logits: Rows of `step.score_tokens` -> their logits, [rows, V].
        pool: Log-probs kept with blocks; None if none are kept.
        is_alone: Whether no other rank takes part in scoring. Another rank would wait for a scoring that this rank has
            given up, so with several ranks running out of memory fails the step.
        is_processed: Whether log-probs of generated tokens are of the distributions that the tokens were drawn from;
            else of the model's logits.
    """
    failures: dict[int, str] = {}
    tokens = next_tokens(logits, step)  # [m]
    generated = _score_generated(logits, tokens, step.sampling, failures, is_processed=is_processed)
    prompt, kept = {}, {}
    for part in step.prompt_scores:
        with _out_of_memory_fails(part.request_id, failures) if is_alone else contextlib.nullcontext():
            if part.kept_blocks:
                assert pool is not None, "log-probs are kept"
                kept[part.request_id] = read_log_probs(pool, part.kept_blocks)
            prompt[part.request_id] = _score_prompt(scored_logits, part, logits, _keeper(part, step, pool))
    return dataclasses.replace(
        _by_request(step.sampling, tokens, generated, prompt, failures), kept_prompt_log_probs=kept
    )


def _keeper(part: PromptScore, step: ModelInput, pool: LogProbPool | None) -> Callable[[Tensor], None] | None:
    """Return what keeps the log-probs of a span of scored tokens with their blocks; None if they are not kept."""
    if not part.keeps:
        return None
    assert pool is not None, "log-probs are kept"
    assert step.kept_log_probs is not None, "log-probs are kept"
    places = step.kept_log_probs.log_probs[part.rows]
    return partial(keep_log_probs, pool, places=places)


def next_tokens(logits: Tensor, step: ModelInput) -> Tensor:
    """Return the token of every sampling row: [m]."""
    rows = [row.sampling for row in step.sampling]
    return sample(logits, eager_sampler_input(rows, logits.shape[1], logits.device))


def _by_request(
    rows: Sequence[SamplingRow],
    tokens: Tensor,
    generated: Mapping[int, Score],
    prompt: dict[int, tuple[Score, ...]],
    failures: dict[int, str],
) -> StepResult:
    """Group the results of a step's rows by request; a request with drafts has several consecutive rows."""
    drawn = tokens.tolist()
    verified = [i for i, row in enumerate(rows) if row.drafts]
    first = [i for i, row in enumerate(rows) if not row.drafts] if verified else range(len(rows))
    names = [rows[i].request_id for i in first]
    result = StepResult(
        tokens={name: drawn[i] for name, i in zip(names, first, strict=True)},
        generated={rows[i].request_id: score for i, score in generated.items() if not rows[i].drafts},
        prompt=prompt,
        failures=failures,
    )
    for i in verified:
        name = rows[i].request_id
        result.target_tokens[name] = (*result.target_tokens.get(name, ()), drawn[i])
        if i in generated:
            result.target_scores[name] = (*result.target_scores.get(name, ()), generated[i])
    return result


def _score_prompt(
    scored_logits: Callable[[slice], Tensor], part: PromptScore, logits: Tensor, keep: Callable[[Tensor], None] | None
) -> tuple[Score, ...]:
    first, count = part.rows.start, len(part.targets)
    targets = to_device(torch.tensor(part.targets), logits.device)

    def logits_of(rows: slice) -> Tensor:
        return scored_logits(slice(first + rows.start, first + min(rows.stop, count)))

    return score_rows(logits_of, logits.shape[-1], targets, [part.top_n] * count, keep)


def _score_generated(
    logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow], failures: dict[int, str], *, is_processed: bool
) -> dict[int, Score]:
    """Return scores of sampled tokens by row, in one batch; row by row if that runs out of memory."""
    asked = [i for i, row in enumerate(rows) if row.sampling.top_n is not None]
    if not asked:
        return {}
    try:
        scores = _score_sampled(logits, tokens, rows, asked, is_processed=is_processed)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return dict(zip(asked, scores, strict=True))
    found = {}
    for i in asked:
        with _out_of_memory_fails(rows[i].request_id, failures):
            (found[i],) = _score_sampled(logits, tokens, rows, [i], is_processed=is_processed)
    return found


def _score_sampled(
    logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow], asked: list[int], *, is_processed: bool
) -> tuple[Score, ...]:
    index = to_device(torch.tensor(asked), logits.device)
    targets, options = tokens.index_select(0, index).clamp(min=0), [rows[i].sampling for i in asked]

    def logits_of(part: slice) -> Tensor:
        own = logits.index_select(0, index[part])
        return eager_processed_logits(own, targets[part], options[part]) if is_processed else own

    return score_rows(logits_of, logits.shape[-1], targets, [one.top_n or 0 for one in options])


@contextlib.contextmanager
def _out_of_memory_fails(request_id: int, failures: dict[int, str]) -> Iterator[None]:
    """Record an out-of-memory error inside this context as a failure of the request."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failures[request_id] = f"no memory for its log-probs: {describe(error)}"
