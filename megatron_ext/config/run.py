"""Settings of a whole run, offline or server: model source, parallelism, engine, prompts or HTTP service."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from megatron_ext.config.annotations import FieldValues
from megatron_ext.config.batching import BatchingConfig, CacheConfig
from megatron_ext.config.kv_events import MAX_BLOCK_TOKENS
from megatron_ext.config.options import flag_of, option, require, require_options
from megatron_ext.config.parallel import ParallelConfig
from megatron_ext.config.request import RequestParams
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.config.server import ServerConfig
from megatron_ext.config.source import SourceConfig
from megatron_ext.config.speculation import SpeculationConfig

FULL_FORMAT = "full"
OUTPUT_FORMATS = ("megatron", FULL_FORMAT)
# Defaults for synthetic prompts if only one of the two is given; the numbers are Megatron's.
DEFAULT_PROMPT_TOKENS = (64, 1024)
DEFAULT_REQUESTS_DURATION = 10.0  # seconds
MAX_SYNTHETIC_PROMPTS = 2**20


@dataclass(frozen=True)
class RunConfig:
    """Settings of `megatron-ext run`: prompts, their arrival, and output."""

    prompts: tuple[str, ...] = option((), "Prompts; default without --prompt-file: the shipped example prompts")
    prompt_file: str | None = option(
        None, "File of prompts, one JSON object per line; - is standard input", metavar="FILE.jsonl"
    )
    prompt_file_num_truncate: int | None = option(
        None, "Number of prompts to read from the file; default: all", minimum=1
    )
    num_tokens_to_prompt: tuple[int, int] | None = option(
        None, "Minimum and maximum length of synthetic prompts in tokens; default: 64 1024"
    )
    incoming_requests_duration: float | None = option(
        None, "Seconds of --incoming-requests-per-sec synthetic prompts; default: 10", above=0
    )
    ignore_unknown_prompt_fields: bool = option(False, "Ignore unknown fields of a prompt line")
    num_tokens_from_file: bool = option(
        False, "Take the number of tokens to generate from each prompt line's chatgpt_output_token_length"
    )
    output_path: str | None = option(None, "Output file of the requests' results, as JSON", metavar="FILE.json")
    run_output_path: str | None = option(
        None, "Output file of the run's counts, as JSON; empty for none; default: FILE.run.json", metavar="FILE.json"
    )  # see `run_results_path`
    output_format: str = option(
        OUTPUT_FORMATS[0],
        "Contents of --output-path: the last pass for Megatron's checker, or all passes and the run's counts",
        choices=OUTPUT_FORMATS,
    )
    output_every_n_results: int = option(1, "Write every nth request, and the last one", minimum=1)
    output_request_events: bool = option(False, "With --output-path: include the events of each request")
    record_throughput: bool = option(True, "Include the throughput in the results")
    throughput_check_only: bool = option(False, "Write only the throughput to --output-path")
    inference_repeat_n: int = option(1, "Number of passes over the prompts, one after the other", minimum=1)
    drain_between_batches: bool = option(
        False, "Submit a batch when all earlier ones have finished; needs --batch-boundaries"
    )
    batch_boundaries: tuple[int, ...] = option((), "Indices, from 0, of the prompts that start a batch")
    incoming_requests_per_step: int | None = option(
        None, "Number of prompts to submit before each engine step; default: all at once", minimum=1
    )
    incoming_requests_per_sec: float | None = option(
        None, "Number of prompts to submit per second; zero or less, and the default: all at once"
    )
    inference_logging_step_interval: int = option(
        0, "Number of steps between two log lines; 0: no log lines", minimum=0, bounds="zero (no log) or more"
    )
    suspend_resume_interval: int = option(
        0,
        "Number of steps between suspend and resume, more than a prefill takes; 0: never",
        minimum=0,
        bounds="zero (never) or more",
    )
    dry_run: bool = option(
        False, "Print bytes of weights, blocks and snapshots, and how many requests fit; load nothing"
    )
    profile: str | None = option(None, "Directory for a trace of the first 100 steps with named phases", metavar="DIR")

    def __post_init__(self) -> None:
        require_options(self)
        self._check_contradictions()
        rate = self.incoming_requests_per_sec
        require(
            self.output_path is None or self.run_results_path != self.output_path,
            f"--run-output-path {self.run_output_path} is the file of --output-path; name another one",
        )
        self._check_synthetic()
        valid_rate = rate is None or math.isfinite(rate)
        require(valid_rate, f"--incoming-requests-per-sec {rate} must be a number; zero or less is all at once")
        increasing = all(a < b for a, b in zip(self.batch_boundaries, self.batch_boundaries[1:], strict=False))
        require(
            increasing and all(index >= 0 for index in self.batch_boundaries),
            f"--batch-boundaries {','.join(map(str, self.batch_boundaries))} must be increasing indices, as in 0,4,8",
        )

    @property
    def run_results_path(self) -> str | None:
        """Path of the counts of the run; by default beside the requests, unless these are in one file with them."""
        if self.output_path is None or self.run_output_path is not None:
            return self.run_output_path or None
        return None if self.output_format == FULL_FORMAT else self.output_path.removesuffix(".json") + ".run.json"

    @property
    def is_synthetic(self) -> bool:
        """True if synthetic prompts are requested and no other prompts are given."""
        asked = self.num_tokens_to_prompt is not None or self.incoming_requests_duration is not None
        return asked and not self.prompts and self.prompt_file is None

    @property
    def synthetic_count(self) -> int:
        """Number of synthetic prompts that arrive in the duration."""
        duration = self.incoming_requests_duration
        return int((self.arrival_rate or 0) * (DEFAULT_REQUESTS_DURATION if duration is None else duration))

    def _check_synthetic(self) -> None:
        shortest, longest = self.num_tokens_to_prompt or DEFAULT_PROMPT_TOKENS
        require(
            1 <= shortest <= longest,
            f"--num-tokens-to-prompt {shortest} {longest} must be the minimum and the maximum length, 1 or more",
        )
        if not self.is_synthetic:
            return
        count = self.synthetic_count
        require(
            1 <= count <= MAX_SYNTHETIC_PROMPTS,
            f"--incoming-requests-per-sec {self.incoming_requests_per_sec} and the duration make {count} synthetic "
            f"prompts; give a rate that makes 1 to {MAX_SYNTHETIC_PROMPTS}",
        )

    @property
    def arrival_rate(self) -> float | None:
        """Prompts to submit per second; None if they do not arrive by time."""
        rate = self.incoming_requests_per_sec
        return rate if rate is not None and rate > 0 else None

    def _check_contradictions(self) -> None:
        given = vars(self)
        both = self.prompts and self.prompt_file
        require(not both, "--prompts and --prompt-file contradict each other; give one of them")
        for name, needed in (
            ("drain_between_batches", "batch_boundaries"),
            ("batch_boundaries", "drain_between_batches"),
            ("output_request_events", "output_path"),
            ("num_tokens_from_file", "prompt_file"),
        ):
            satisfied = not given[name] or given[needed]
            require(satisfied, f"{flag_of(name)} needs {flag_of(needed)}; give both or neither")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a model and its engine from a command line.

    Attributes:
        model_overrides: Given fields of `ModelConfig`; the others come from the checkpoint's configuration, else from
            the dataclass's defaults.
        start_notes: Lines about accepted flags, for the log of the start.
    """

    source: SourceConfig = field(default_factory=SourceConfig)
    model_overrides: FieldValues = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    start_notes: tuple[str, ...] = ()

    @property
    def logging_step_interval(self) -> int | None:
        """Steps between two log lines; 0 for no log, None for a line every ten seconds of work."""
        return 0


@dataclass(frozen=True)
class ServerSettings(EngineSettings):
    """All settings of a server from a command line."""

    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def logging_step_interval(self) -> int | None:
        """Steps between two log lines; see `EngineSettings`."""
        return self.server.inference_logging_step_interval

    def __post_init__(self) -> None:
        object.__setattr__(self, "batching", replace(self.batching, is_served=True))  # on all ranks
        endpoint = self.server.kv_events.kv_events_endpoint
        require(
            self.cache.enable_prefix_caching or endpoint is None,
            f"--no-inference-dynamic-batching-enable-prefix-caching and --kv-events-endpoint {endpoint} contradict "
            "each other: without a cache there are no events; give one of them",
        )
        size = self.batching.block_size
        require(
            endpoint is None or size <= MAX_BLOCK_TOKENS,
            f"--inference-dynamic-batching-block-size {size} and --kv-events-endpoint {endpoint}: blocks that are "
            f"published have at most {MAX_BLOCK_TOKENS} tokens; give a smaller size",
        )


@dataclass(frozen=True)
class InferenceSettings(EngineSettings):
    """All settings of an offline run from a command line.

    Attributes:
        sampling_given: Fields of `sampling` that were given; the model may have defaults for the others.
    """

    sampling: RequestParams = field(default_factory=RequestParams)
    sampling_given: FieldValues = field(default_factory=dict)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def logging_step_interval(self) -> int:
        """Steps between two log lines; see `EngineSettings`."""
        return self.run.inference_logging_step_interval
