"""Parameters of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.annotations import require_types
from megatron_ext.config.checks import require
from megatron_ext.config.response_format import ResponseFormat
from megatron_ext.config.token_biases import NO_BIASES, TokenBiases

LARGEST_PENALTY = 2.0  # presence and frequency penalties, as OpenAI's
LARGEST_FACTOR = 100.0  # repetition penalty, or its inverse
MAX_CHECKPOINTS = 64


@dataclass(frozen=True)
class RequestParams:
    """Sampling parameters, stop conditions and log-prob options of a request. Greedy by default; docs/sampling.md."""

    num_tokens_to_generate: int = 30  # 0 only computes the prompt, and scores it if requested
    min_tokens: int = 0  # until then neither an end token nor a stop word ends the generation
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off, 1 is greedy
    top_p: float = 0.0  # 0 is off
    min_p: float = 0.0  # share of the best token's probability; 0 is off
    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # the same, once per occurrence
    repetition_penalty: float = 1.0  # divides positive logits of prompt and output tokens, multiplies negative ones
    logit_bias: TokenBiases = NO_BIASES
    bad_words: tuple[str, ...] = ()
    response_format: ResponseFormat | None = None  # default: any text
    seed: int | None = None  # default: derived from the run's seed and the request id
    stop_words: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # end tokens in addition to the termination token, even with `ignore_eos`
    termination_id: int | None = None  # default: the tokenizer's end-of-document, and generation_config.json's others
    ignore_eos: bool = False
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    top_n_logprobs: int = 0
    skip_special_tokens: bool = True  # in the text
    cache_salt: str | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int | None = None  # maximum drafts per step; 0 is off; default: the engine's
    cache_checkpoint: tuple[int, ...] = ()  # positions where other requests may diverge from the prompt
    track_generated_token_events: bool = False  # an event for each token, not only for the first

    def __post_init__(self) -> None:
        for name in ("stop_words", "bad_words"):
            words = getattr(self, name)
            require(not isinstance(words, str), f"{name} {words!r} is one text; give a list of them")
        require_types(self)
        self._check_counts()
        self._check_choice()
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
        least = min(positions, default=1)
        require(least > 0, f"cache_checkpoint {least}: positions are numbers of tokens from the start, 1 or more")
        require(
            len(positions) <= MAX_CHECKPOINTS,
            f"cache_checkpoint has {len(positions)} positions; at most {MAX_CHECKPOINTS} would do",
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

    def _check_choice(self) -> None:
        valid_temperature = math.isfinite(self.temperature) and self.temperature >= 0
        require(valid_temperature, f"temperature {self.temperature} must be zero (greedy) or more")
        require(self.top_k >= 0, f"top_k {self.top_k} must be zero (off) or more")
        require(0 <= self.top_p <= 1, f"top_p {self.top_p} must be between 0 (off) and 1")
        require(0 <= self.min_p <= 1, f"min_p {self.min_p} must be between 0 (off) and 1")

    def _check_logits(self) -> None:
        most = LARGEST_PENALTY
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            require(-most <= penalty <= most, f"{name} {penalty} must be between -{most:g} and {most:g}; 0 is off")
        factor, largest = self.repetition_penalty, LARGEST_FACTOR
        require(
            1 / largest <= factor <= largest,
            f"repetition_penalty {factor} must be between {1 / largest:g} and {largest:g}; 1 is off",
        )
        problem = self.logit_bias.problem
        require(problem is None, f"logit_bias: {problem}")
        require(
            self.form is None or not self.min_tokens,
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
    def form(self) -> ResponseFormat | None:
        """Response format that the output must have; None if any text is allowed."""
        return None if self.response_format is None or self.response_format.is_free else self.response_format

    @property
    def has_penalties(self) -> bool:
        """True if penalties change logits depending on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def processes_logits(self) -> bool:
        """True if logits processors are needed before temperature, top_k and top_p."""
        is_cut = self.min_p > 0 and not self.is_greedy
        return self.has_penalties or is_cut or bool(self.logit_bias or self.bad_words or self.form)
