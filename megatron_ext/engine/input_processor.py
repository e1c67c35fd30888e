"""Input processor: makes requests from callers' input and rejects invalid input.

A request may continue the output of another one that ended early, whose record has all that this takes. Tokens of that
output count as generated: for penalties, limits and grammars, and for the random generator, which goes on after their
numbers. Keys, values and states come from the cache as far as it has them; the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.config.request import ResponseFormat
from megatron_ext.engine.structured_output import MaskThread
from megatron_ext.errors import ConfigError
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.text.matcher import Matcher
from megatron_ext.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class InputSettings:
    """Settings of the input processor.

    Attributes:
        tokenize: Function from a text, and whether to prepend the BOS token, to token ids.
        vocabulary: Vocabulary; checks which ids can be served.
        ends: Tokens that end a document, unless a request names another one.
        seed: Seed from which, with their ids, requests without a seed of their own derive one.
        word_tokens: Function from a bad word to its possible tokenizations.
        matcher: Function that compiles a response format, unless it is compiled; raises `ConfigError` if it cannot.
        max_drafts: Maximum number of drafts of a request in a step.
        mask_thread: Thread that computes masks of structured outputs.
    """

    tokenize: Callable[[str, bool], Sequence[int]]
    vocabulary: Vocabulary
    ends: tuple[int, ...]
    seed: int
    word_tokens: Callable[[str], Sequence[tuple[int, ...]]]
    matcher: Callable[[ResponseFormat], Matcher]
    max_drafts: int = 0
    mask_thread: MaskThread = field(default_factory=MaskThread)


class InputProcessor:
    """Input processor: makes requests and numbers them in order of arrival."""

    def __init__(self, input_settings: InputSettings) -> None:
        self._settings = input_settings
        self._next_arrival = 0

    def tokenize(self, prompt: str | Sequence[int], add_bos: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Raises:
            ConfigError: The prompt is empty, or contains an id that is not a token.
        """
        tokens = _plain_ids(self._settings.tokenize(prompt, add_bos) if isinstance(prompt, str) else prompt)
        self._check_prompt(tokens)
        return tokens

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise ConfigError("the prompt is empty; it needs at least one token")
        self._settings.vocabulary.check_prompt(tokens)

    def make(self, request_id: int, inputs: RequestInputs, group: int | None = None) -> Request:
        """Make a request.

        Raises:
            ConfigError: The prompt is empty or has an id that is not a token, the tokenizer cannot read a bad word, a
                biased id is not a token, the response format cannot be compiled, a checkpoint lies after the prompt,
                there are more drafts than allowed, or the other output cannot be continued.
        """
        tokens, params, continued = inputs.prompt_tokens, inputs.params, inputs.continued
        self._check_prompt(tokens)
        ends = self._end_ids(params)
        _check_checkpoints(params.cache_checkpoint, len(tokens))
        check_drafts(params, self._settings.max_drafts)
        if params.response_format is not None:
            matcher = self._settings.matcher(params.response_format)
            if not ends:
                raise ConfigError("response_format needs a token that ends the answer; leave ignore_eos out")
            try:  # now: a grammar without any output must be refused, not fail in the first step
                matcher.allowed(ends)
            except ValueError as refused:
                raise ConfigError(f"response_format: no output can begin: {refused}") from None
        if params.logit_bias:
            self._settings.vocabulary.check_biased([token for token, _ in params.logit_bias])
        if continued is not None:
            _check_continuation(continued, tokens, params, ends)
            self._settings.vocabulary.check_prompt(continued.generated_tokens)
        request = Request(
            request_id,
            inputs,
            self._next_arrival,
            self._seed(request_id, params, continued),
            end_ids=ends,
            bad_words=tuple(tokens for word in params.bad_words for tokens in self._settings.word_tokens(word)),
            group=group,
            continued_tokens=() if continued is None else continued.generated_tokens,
        )
        self._next_arrival += 1
        if continued is not None:
            _restore_output(request, continued)
        return request

    def _seed(self, request_id: int, params: RequestParams, continued: RequestRecord | None) -> int | str:
        if params.seed is not None:
            return params.seed
        return f"{self._settings.seed}/{request_id}" if continued is None else continued.seed

    def _end_ids(self, params: RequestParams) -> tuple[int, ...]:
        """Return the tokens that end a request: end-of-document unless replaced or ignored, and its own stop tokens."""
        usual = self._settings.ends if params.termination_id is None else (params.termination_id,)
        return tuple(dict.fromkeys((*(() if params.ignore_eos else usual), *params.stop_token_ids)))


def _check_checkpoints(positions: Sequence[int], length: int) -> None:
    last = max(positions, default=0)
    if last > length:
        raise ConfigError(f"cache_checkpoint {last} must be at most the {length} tokens of the prompt")


def _plain_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as Python integers, whatever type they had; all at once if they can be packed."""
    try:
        return tuple(packed_tokens(ids))
    except (TypeError, OverflowError):  # texts, fractions, negative ids: refused later, with a message
        return tuple(map(int, ids))


def check_drafts(params: RequestParams, max_drafts: int) -> None:
    """Check that a request asks for at most `max_drafts` drafts.

    Raises:
        ConfigError: The request asks for more.
    """
    asked = params.num_speculative_tokens
    if asked is not None and asked > max_drafts:
        limit = f"at most --num-speculative-tokens {max_drafts}" if max_drafts else "0 without --speculative-method"
        raise ConfigError(f"num_speculative_tokens {asked} must be {limit}")


def _check_continuation(
    record: RequestRecord, prompt_tokens: Sequence[int], params: RequestParams, ends: Sequence[int]
) -> None:
    """Check that a request with these parameters and tokens that end it can continue the output of a record."""
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


def _restore_output(request: Request, record: RequestRecord) -> None:
    """Give a request the log-probs and versions of the tokens that it continues."""
    output = request.output
    request.versions.restore(record.weights_version, record.prefix_weights_version)
    if not record.generated_tokens:  # the prompt is scored again
        return
    output.generated_log_probs += record.generated_log_probs or ()
    output.generated_top_n += record.generated_top_n_log_probs or ()
    output.prompt_log_probs += record.prompt_log_probs or ()
    output.prompt_top_n += record.prompt_top_n_log_probs or ()
