"""A run from its start to its end: where the model comes from, how it is spread, what is served and to whom."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_ext.config.access import AccessConfig
from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.batching import BatchingConfig, CacheConfig
from megatron_ext.config.checks import flag_of, require
from megatron_ext.config.limits import ServerLimits
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.request import RequestParams

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class SourceConfig:
    """Where the weights and the tokenizer come from, and in which type they live."""

    load: str | None = None
    load_hf: str | None = None
    save: str | None = None
    model_config: str | None = None  # a YAML file of flags
    tokenizer_type: str | None = None  # "NullTokenizer" or "HuggingFaceTokenizer"; default: what the checkpoint has
    tokenizer_model: str | None = None  # a directory or tokenizer.json
    bf16: bool = False
    fp16: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        require(
            not (self.load and self.load_hf),
            f"--load {self.load} and --load-hf {self.load_hf} contradict each other; give one of them",
        )
        require(not (self.bf16 and self.fp16), "--bf16 and --fp16 contradict each other; give one of them")
        require(0 <= self.seed < 2**63, f"--seed {self.seed} must be between 0 and {2**63 - 1}")


@dataclass(frozen=True)
class RunConfig:
    """What `tools/run_inference.py` does with the prompts, and when."""

    prompts: tuple[str, ...] = ()
    prompt_file: str | None = None  # "-" is standard input; default: the shipped prompts
    ignore_unknown_prompt_fields: bool = False
    num_tokens_from_file: bool = False  # a line's chatgpt_output_token_length is what it generates
    output_path: str | None = None
    output_request_events: bool = False
    inference_repeat_n: int = 1
    drain_between_batches: bool = False
    batch_boundaries: tuple[int, ...] = ()  # indices of the prompts that start a batch
    incoming_requests_per_step: int | None = None  # default: all at once
    incoming_requests_per_sec: float | None = None  # default, zero and less: all at once
    inference_logging_step_interval: int = 0  # steps; 0 is no log
    suspend_resume_interval: int = 0  # steps; 0 is never
    prefix_cache_compare: bool = False

    def __post_init__(self) -> None:
        self._check_contradictions()
        rate, per_step = self.incoming_requests_per_sec, self.incoming_requests_per_step
        interval = self.inference_logging_step_interval
        require(self.inference_repeat_n >= 1, f"--inference-repeat-n {self.inference_repeat_n} must be at least 1")
        require(per_step is None or per_step >= 1, f"--incoming-requests-per-step {per_step} must be at least 1")
        valid_rate = rate is None or math.isfinite(rate)
        require(valid_rate, f"--incoming-requests-per-sec {rate} must be a number; zero or less is all at once")
        require(interval >= 0, f"--inference-logging-step-interval {interval} must be zero (no log) or more")
        suspend = self.suspend_resume_interval
        require(suspend >= 0, f"--suspend-resume-interval {suspend} must be zero (never) or more")
        increasing = all(a < b for a, b in zip(self.batch_boundaries, self.batch_boundaries[1:], strict=False))
        require(
            increasing and all(index >= 0 for index in self.batch_boundaries),
            f"--batch-boundaries {','.join(map(str, self.batch_boundaries))} must be increasing indices, as in 0,4,8",
        )

    @property
    def arrival_rate(self) -> float | None:
        """Prompts to submit a second; None if they do not come by the clock."""
        rate = self.incoming_requests_per_sec
        return rate if rate is not None and rate > 0 else None

    def _check_contradictions(self) -> None:
        given = vars(self) | {"incoming_requests_per_sec": self.arrival_rate}
        alone = "contradict each other; give one of them"
        for one, other in (
            ("prompts", "prompt_file"),
            ("incoming_requests_per_step", "incoming_requests_per_sec"),
            ("drain_between_batches", "incoming_requests_per_step"),
            ("drain_between_batches", "incoming_requests_per_sec"),
        ):
            both = given[one] and given[other]
            require(not both, f"{flag_of(one)} and {flag_of(other)} {alone}")
        for name, needed in (
            ("drain_between_batches", "batch_boundaries"),
            ("batch_boundaries", "drain_between_batches"),
            ("output_request_events", "output_path"),
            ("num_tokens_from_file", "prompt_file"),
        ):
            satisfied = not given[name] or given[needed]
            require(satisfied, f"{flag_of(name)} needs {flag_of(needed)}; give both or neither")


@dataclass(frozen=True)
class ServerConfig(AccessConfig):
    """What `tools/run_server.py` listens on, whom it lets in, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: str | None = None  # default: the last part of the checkpoint's path
    max_waiting_requests: int = 256
    shutdown_timeout: float = 30.0  # seconds
    inference_logging_step_interval: int = 0  # steps; 0 is no log
    log_level: str = "info"  # one of LOG_LEVELS
    access_log: bool = True  # a line for each request
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        super().__post_init__()
        level, levels = self.log_level, ", ".join(LOG_LEVELS)
        require(level in LOG_LEVELS, f"--log-level {level!r} is unknown; one of {levels}")
        require(bool(self.host), "--host is empty; 127.0.0.1 is this machine, 0.0.0.0 every network")
        require(0 <= self.port <= 65535, f"--port {self.port} must be between 0 (any free one) and 65535")
        require(self.served_model_name != "", "--served-model-name is empty; leave it out for the checkpoint's name")
        waiting, timeout = self.max_waiting_requests, self.shutdown_timeout
        require(waiting >= 0, f"--max-waiting-requests {waiting} must be zero or more")
        valid_timeout = math.isfinite(timeout) and timeout >= 0
        require(valid_timeout, f"--shutdown-timeout {timeout} must be zero (cancel at once) or more seconds")
        interval = self.inference_logging_step_interval
        require(interval >= 0, f"--inference-logging-step-interval {interval} must be zero (no log) or more")


@dataclass(frozen=True)
class ServerSettings:
    """Everything that a command line says about a server. `model_overrides` as in `InferenceSettings`."""

    source: SourceConfig = SourceConfig()
    model_overrides: FieldValues = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


@dataclass(frozen=True)
class InferenceSettings:
    """Everything that a command line says about a run.

    `model_overrides` are the fields of `ModelConfig` that were given; a checkpoint's own configuration fills the
    others, the dataclass's defaults what is left.
    """

    source: SourceConfig = SourceConfig()
    model_overrides: FieldValues = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    sampling: RequestParams = field(default_factory=RequestParams)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        require(
            self.cache.enable_prefix_caching or not self.run.prefix_cache_compare,
            "--no-inference-dynamic-batching-enable-prefix-caching and --prefix-cache-compare contradict each other; "
            "give one of them",
        )
        require(
            self.sampling.return_log_probs or not self.sampling.skip_prompt_log_probs,
            "--skip-prompt-log-probs says which log-probs to leave out, and none are asked for; give "
            "--return-log-probs too, or leave it out",
        )
