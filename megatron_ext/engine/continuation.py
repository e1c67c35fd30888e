"""Continuation of a request that ended early: its record has all that another request needs to go on in its place.

Tokens of the output count as generated: for penalties, limits and grammars, and for the random generator, which goes on
after their numbers. Keys, values and states come from the cache as far as it has them; the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from megatron_ext.config import RequestParams
from megatron_ext.errors import ConfigError
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request


def check_continuation(
    record: RequestRecord, prompt_tokens: Sequence[int], params: RequestParams, ends: Sequence[int]
) -> None:
    """Check that a request with these parameters can continue the output of a record.

    Args:
        record: Record of the request that ended early.
        prompt_tokens: Prompt of the request that continues it.
        params: Parameters of that request.
        ends: Tokens that end its output.

    Raises:
        ConfigError: The output is complete, its prompt is another one, or it lacks log-probs that are requested.
    """
    tokens, limit = record.generated_tokens, params.num_tokens_to_generate
    if tuple(prompt_tokens) != record.prompt_tokens:
        raise ConfigError("the prompt differs from the prompt of the record to continue; leave it as it was")
    is_last = bool(tokens) and tokens[-1] in ends and len(tokens) > params.min_tokens
    if is_last or (record.status is Status.COMPLETED and record.finish_reason == "stop"):
        raise ConfigError(f"the output of request {record.request_id} has ended with a stop; send its prompt instead")
    if len(tokens) >= limit:
        raise ConfigError(
            f"request {record.request_id} has {len(tokens)} generated tokens, and num_tokens_to_generate is {limit}; "
            "give a larger number to continue it"
        )
    if tokens:
        _check_scores(record, params)


def _check_scores(record: RequestRecord, params: RequestParams) -> None:
    generated, prompt = len(record.generated_tokens), len(record.prompt_tokens) - 1
    has_top_n = params.top_n_logprobs > 0
    wanted: list[tuple[str, bool, Sized | None, int]] = [
        ("generated_log_probs", params.return_log_probs, record.generated_log_probs, generated),
        ("generated_top_n_log_probs", has_top_n, record.generated_top_n_log_probs, generated),
        ("prompt_log_probs", params.wants_prompt_log_probs, record.prompt_log_probs, prompt),
        ("prompt_top_n_log_probs", has_top_n and params.wants_prompt_log_probs, record.prompt_top_n_log_probs, prompt),
    ]
    for name, is_wanted, found, count in wanted:
        if is_wanted and (found is None or len(found) != count):
            raise ConfigError(
                f"request {record.request_id} has {0 if found is None else len(found)} {name} and needs {count} to be "
                "continued with them; request none"
            )


def restore_output(request: Request, record: RequestRecord) -> None:
    """Give a request the log-probs and versions of the tokens that it continues."""
    output = request.output
    request.versions.restore(record.weights_version, record.prefix_weights_version)
    if not record.generated_tokens:  # the prompt is scored again
        return
    output.generated_log_probs += record.generated_log_probs or ()
    output.generated_top_n += record.generated_top_n_log_probs or ()
    output.prompt_log_probs += record.prompt_log_probs or ()
    output.prompt_top_n += record.prompt_top_n_log_probs or ()
