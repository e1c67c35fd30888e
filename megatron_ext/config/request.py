"""What one request asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.config.annotations import require_types
from megatron_ext.config.checks import require


@dataclass(frozen=True)
class RequestParams:
    """What one request asks for: sampling, stopping, log-probs. Greedy by default."""

    num_tokens_to_generate: int = 30
    min_tokens: int = 0  # before them neither the termination token nor a stop word ends the generation
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off, 1 is greedy
    top_p: float = 0.0  # 0 is off
    seed: int | None = None  # default: derived from the run's seed and the request id
    stop_words: tuple[str, ...] = ()
    termination_id: int | None = None  # default: the tokenizer's end-of-document
    ignore_eos: bool = False
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    top_n_logprobs: int = 0
    cache_salt: str | None = None
    enable_prefix_caching: bool = True
    track_generated_token_events: bool = False  # an event for each token, beside that for the first

    def __post_init__(self) -> None:
        is_text = isinstance(self.stop_words, str)
        require(not is_text, f"stop_words {self.stop_words!r} is one text; give a list of them")
        require_types(self)
        count, n = self.num_tokens_to_generate, self.top_n_logprobs
        require(count >= 1, f"num_tokens_to_generate {count} must be at least 1")
        fewest = self.min_tokens
        require(
            0 <= fewest <= count,
            f"min_tokens {fewest} must be between 0 and num_tokens_to_generate, which is {count}",
        )
        valid_temperature = math.isfinite(self.temperature) and self.temperature >= 0
        require(valid_temperature, f"temperature {self.temperature} must be zero (greedy) or more")
        require(self.top_k >= 0, f"top_k {self.top_k} must be zero (off) or more")
        require(0 <= self.top_p <= 1, f"top_p {self.top_p} must be between 0 (off) and 1")
        require(n >= 0, f"top_n_logprobs {n} must be zero (off) or more")
        require(
            n == 0 or self.return_log_probs,
            f"top_n_logprobs {n} needs return_log_probs; set it or leave top_n_logprobs out",
        )
        require(all(self.stop_words), "a stop word is empty; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken, without randomness."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def wants_prompt_log_probs(self) -> bool:
        """Whether the log-probs of the prompt's own tokens are asked for."""
        return self.return_log_probs and not self.skip_prompt_log_probs
