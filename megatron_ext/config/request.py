"""Parameters of one request."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.annotations import require_types
from megatron_ext.config.checks import require
from megatron_ext.config.options import option, require_bounds
from megatron_ext.config.response_format import ResponseFormat
from megatron_ext.config.token_biases import NO_BIASES, TokenBiases

LARGEST_PENALTY = 2.0  # presence and frequency penalties, as OpenAI's
LARGEST_FACTOR = 100.0  # repetition penalty, or its inverse
MAX_CHECKPOINTS = 64


@dataclass(frozen=True)
class RequestParams:
    """Sampling parameters, stop conditions and log-prob options of a request. Greedy by default; docs/sampling.md."""

    # Length. 0 generated tokens: the prompt is only computed, and scored if requested.
    num_tokens_to_generate: int = option(30, "Maximum number of tokens to generate")
    min_tokens: int = 0  # until then neither an end token nor a stop word ends the generation

    # Filters and draw of a token; `top_k` 1 is greedy, too
    temperature: float = option(
        0.0,
        "Sampling temperature; 0: greedy",
        minimum=0,
        bounds="zero (greedy) or more",
        in_generation_config=True,
    )
    top_k: int = option(
        0,
        "Sample from the k most likely tokens; 0: off, 1: greedy",
        flag="--top_k",
        minimum=0,
        bounds="zero (off) or more",
        in_generation_config=True,
    )
    top_p: float = option(
        0.0,
        "Sample from the smallest set of most likely tokens with at least this total probability; 0: off",
        flag="--top_p",
        minimum=0,
        maximum=1,
        bounds="between 0 (off) and 1",
        in_generation_config=True,
    )
    min_p: float = option(
        0.0,
        "Sample from tokens with at least this fraction of the most likely token's probability; 0: off",
        flag="--min_p",
        minimum=0,
        maximum=1,
        bounds="between 0 (off) and 1",
        in_generation_config=True,
    )

    # Logits. The first two are subtracted from logits of generated tokens. The third divides positive logits of prompt
    # and output tokens, and multiplies negative ones.
    presence_penalty: float = option(
        0.0,
        "Subtract this from the logits of tokens generated so far; 0: off",
        minimum=-LARGEST_PENALTY,
        maximum=LARGEST_PENALTY,
        bounds=f"between -{LARGEST_PENALTY:g} and {LARGEST_PENALTY:g}; 0 is off",
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from a token's logit for each time that the token was generated; 0: off",
        minimum=-LARGEST_PENALTY,
        maximum=LARGEST_PENALTY,
        bounds=f"between -{LARGEST_PENALTY:g} and {LARGEST_PENALTY:g}; 0 is off",
    )
    repetition_penalty: float = option(
        1.0,
        "Divide positive logits of the prompt's and generated tokens by this, and multiply negative ones; 1: off",
        minimum=1 / LARGEST_FACTOR,
        maximum=LARGEST_FACTOR,
        bounds=f"between {1 / LARGEST_FACTOR:g} and {LARGEST_FACTOR:g}; 1 is off",
        in_generation_config=True,
    )
    logit_bias: TokenBiases = option(
        NO_BIASES, "Numbers to add to the logits of tokens: a JSON object by token id", metavar="JSON"
    )
    bad_words: tuple[str, ...] = option((), "Words that must not be generated")
    response_format: ResponseFormat | None = option(  # default: any text
        None, "Format that outputs must have: OpenAI's response_format, or a regex; default: any text", metavar="JSON"
    )
    seed: int | None = None  # default: derived from the run's seed and the request id

    # Log-probs
    return_log_probs: bool = option(False, "Return log-probs of the prompt's and the generated tokens")
    skip_prompt_log_probs: bool = option(False, "With --return-log-probs: omit log-probs of the prompt")
    top_n_logprobs: int = option(0, "With --return-log-probs: number of most likely tokens to return at each position")

    # End and text. `stop_token_ids` end a generation even with `ignore_eos`.
    stop_words: tuple[str, ...] = option((), "Words that end a generation; they are removed from the text")
    stop_token_ids: tuple[int, ...] = option(
        (), "Token ids that end a generation in addition to the end-of-document token, even with --ignore-eos"
    )
    # Default: the tokenizer's end-of-document, and the others of generation_config.json
    termination_id: int | None = option(
        None, "Token id that ends a generation; default: the end-of-document tokens", metavar="ID"
    )
    ignore_eos: bool = option(False, "Continue after an end-of-document token")
    skip_special_tokens: bool = option(True, "Remove special tokens from texts")
    detokenize_stop_sequence: bool = False  # keep the stop word, and the end token if it has a text, in the text

    # Prefix cache and drafts
    cache_salt: str | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int | None = None  # maximum drafts per step; 0 is off; default: the engine's
    cache_checkpoint: tuple[int, ...] = ()  # positions where other requests may diverge from the prompt

    track_generated_token_events: bool = option(
        False,
        "With --output-request-events: record an event for each generated token",
        flag="--inference-dynamic-batching-track-generated-token-events",
    )

    def __post_init__(self) -> None:
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            require(not isinstance(words, str), f"{name} {words!r} is one text; give a list of them")
        require_types(self)
        if self.response_format is not None and self.response_format.is_free:
            object.__setattr__(self, "response_format", None)
        self._check_counts()
        require_bounds(self)
        self._check_logits()
        self._check_checkpoints()
        require(all(self.stop_words), "a stop word is empty; leave it out")
        require(all(word.strip() for word in self.bad_words), "a bad word is empty; leave it out")
        require(
            all(token >= 0 for token in self.stop_token_ids),
            f"stop_token_ids {min(self.stop_token_ids, default=0)}: token ids are zero or more",
        )

    def _check_checkpoints(self) -> None:
        positions = self.cache_checkpoint
        minimum = min(positions, default=1)
        require(minimum > 0, f"cache_checkpoint {minimum}: positions are numbers of tokens from the start, 1 or more")
        require(
            len(positions) <= MAX_CHECKPOINTS,
            f"cache_checkpoint has {len(positions)} positions, and must have at most {MAX_CHECKPOINTS}",
        )

    def _check_counts(self) -> None:
        count, fewest, n = self.num_tokens_to_generate, self.min_tokens, self.top_n_logprobs
        require(count >= 0, f"num_tokens_to_generate {count} must be zero (only the prompt is computed) or more")
        require(
            0 <= fewest <= count,
            f"min_tokens {fewest} must be between 0 and num_tokens_to_generate, which is {count}",
        )
        require(n >= 0, f"top_n_logprobs {n} must be zero (off) or more")
        drafts = self.num_speculative_tokens
        require(drafts is None or drafts >= 0, f"num_speculative_tokens {drafts} must be zero (off) or more")
        require(
            n == 0 or self.return_log_probs,
            f"top_n_logprobs {n} needs return_log_probs; set it or leave top_n_logprobs out",
        )

    def _check_logits(self) -> None:
        problem = self.logit_bias.problem
        require(problem is None, f"logit_bias: {problem}")
        require(
            self.response_format is None or not self.min_tokens,
            f"min_tokens {self.min_tokens} and response_format contradict each other: the form says where the answer "
            "may end; give one of them",
        )

    @property
    def is_greedy(self) -> bool:
        """True if the best token is taken, without randomness."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_prompt_log_probs(self) -> bool:
        """True if the log-probs of the prompt tokens are requested."""
        return self.return_log_probs and not self.skip_prompt_log_probs

    @property
    def has_penalties(self) -> bool:
        """True if penalties change logits depending on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def processes_logits(self) -> bool:
        """True if logits processors are needed before temperature, top_k and top_p."""
        is_cut = self.min_p > 0 and not self.is_greedy
        return self.has_penalties or is_cut or bool(self.logit_bias or self.bad_words or self.response_format)
