"""Offline run: load, submit the prompts, report. Implements `megatron-ext run`.

A signal before the first request ends the run at once. While requests run, and while results are written, a signal is
only noted: requests end as aborted, and results are written as usual. Nothing is printed before they are.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from megatron_ext.config import FULL_FORMAT, InferenceSettings
from megatron_ext.console.kv_cache_table import make_console, print_dry_run, print_engine
from megatron_ext.console.profiling import profiled
from megatron_ext.console.start import StartUp, check_machine, check_profile, say_start
from megatron_ext.console.terminal import Output, printable
from megatron_ext.engine.input_processor import check_drafts
from megatron_ext.engine.result import StepOutput
from megatron_ext.errors import ConfigError, OutputError
from megatron_ext.mcore import platform
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.models.engine_args import EngineArgs, follow, plan_without_weights
from megatron_ext.models.generation_defaults import request_defaults
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.offline.console_report import print_report
from megatron_ext.offline.output_file import RUN_OUTPUT_FLAG, PartialResults, check_output_paths, write_results
from megatron_ext.offline.passes import Pass, check_schedule, run_passes
from megatron_ext.offline.progress import Bar, progress_bar
from megatron_ext.offline.prompts import Prompt, read_prompts, tokenize_prompts
from megatron_ext.offline.results import (
    PromptTexts,
    RequestEntries,
    full_results,
    megatron_results,
    run_results,
    without_throughput,
    written,
)
from megatron_ext.parallel.failure import ending_together
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.signals import Interruption
from megatron_ext.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


def run_offline(
    settings: InferenceSettings, interruption: Interruption | None = None, start_up: StartUp | None = None
) -> bool:
    """Check all settings, load, run, write the results, print them.

    Args:
        interruption: Signal handler; None for no handling of signals.
        start_up: Reports the phases until the first request; by default from now on.

    Returns:
        Whether every request completed.

    Raises:
        ConfigError: The user made a mistake; no request has run.
        OutputError: The requests ran, and the results could not be written or printed.
        Interrupted: A signal came; the message counts requests by status, and says where results are.
    """
    interruption = interruption or Interruption()
    say_start(settings.start_notes)
    check_machine(settings.parallel)
    try:
        with ending_together(settings.parallel.distributed_timeout_minutes):
            platform.initialize(settings.parallel)
            if settings.run.dry_run:
                print_dry_run(plan_without_weights(settings), make_console(quiet=False))
                return True
            parallel_context = make_parallel_context(settings.parallel)
            if parallel_context is not None and not parallel_context.is_driver:
                follow(settings, parallel_context, interruption.keep_quiet)
                return True
            check_profile(settings.run.profile, parallel_context)
            with start_up or StartUp() as reported:
                return _Offline(settings, _read_prompts(settings), interruption, parallel_context, reported).run()
    finally:
        platform.shut_down()


def _read_prompts(settings: InferenceSettings) -> Sequence[Prompt]:
    run = settings.run
    defaults = request_defaults(settings.source, settings.sampling_given)
    prompts = read_prompts(run, defaults, seed=settings.source.seed)
    check_schedule(run, len(prompts))
    for prompt in prompts:
        try:
            check_drafts(prompt.params, settings.speculation.num_speculative_tokens)
        except ConfigError as error:
            raise ConfigError(f"{prompt.source}: {error}") from None
    check_output_paths(run)
    return prompts


class _Offline:
    """Loaded model and its prompts."""

    def __init__(
        self,
        settings: InferenceSettings,
        prompts: Sequence[Prompt],
        interruption: Interruption,
        parallel_context: ParallelContext | None,
        start_up: StartUp,
    ) -> None:
        self._settings = settings
        self._start_up = start_up
        self._interruption = interruption
        self._args = EngineArgs(settings, parallel_context, start_up.phase)
        self._loaded = self._args.loaded
        tokenizer, vocab_size = self._loaded.tokenizer, self._loaded.config.vocab_size
        assert vocab_size is not None, "a model has been built of it"
        self._prompts = tokenize_prompts(prompts, tokenizer, vocab_size)
        self._expected = [len(prompt.prompt_tokens) + prompt.params.num_tokens_to_generate for prompt in self._prompts]
        self._vocabulary = Vocabulary(tokenizer, vocab_size)
        self._prompt_text = PromptTexts(self._vocabulary.detokenize)
        self._entries = RequestEntries(
            self._prompt_text,
            self._vocabulary.detokenize,
            with_events=settings.run.output_request_events,
            with_drafts=settings.speculation.is_on,
            with_disk=settings.cache.is_durable,
            with_graphs=settings.batching.has_input_buffers,
        )
        self._output = Output(sys.stdout)
        self._console = make_console(quiet=False, output=self._output)
        self._partial: PartialResults | None = None

    def run(self) -> bool:
        """Run the prompts. Return whether every request completed."""
        engine = LLMEngine(self._args.build_engine(), steps_itself=False)
        self._start_up.ready()  # removes the bar, which the table would begin beside
        print_engine(engine, self._loaded.name, self._console)
        self._interruption.hold()
        with profiled(engine, self._settings.run.profile):
            passes = self._serve(engine)
            # A second signal ends the writing of the cache to disk, and the results are written.
            with self._interruption.cutting_short(engine.stop_keeping) if engine.keeps_cache else nullcontext():
                engine.close()
        problem = self._write(engine, passes)
        self._end_if_asked(passes, problem)
        lost = engine.counts()[0].prefix_cache_lost()
        print_report(passes, self._console, self._where(problem), self._prompt_text, lost)
        problem = problem or self._output.failure
        if problem is not None:
            raise OutputError(problem)
        return all(record.status is Status.COMPLETED for record in _records(passes))

    def _serve(self, engine: LLMEngine) -> list[Pass]:
        """Run the prompts; after each step, ended requests are on disk and on the screen."""
        run = self._settings.run
        if run.output_path is not None:
            self._partial = PartialResults(run.output_path, self._entries)

        def after_step(output: StepOutput, bar: Bar) -> None:
            if self._partial is not None:
                self._partial.add(output.records)
            bar.update(output)

        with self._hint_of_a_crash(), progress_bar(self._expected * run.inference_repeat_n) as bar:
            return run_passes(
                engine, self._prompts, run, lambda output: after_step(output, bar), lambda: self._interruption.is_asked
            )

    @contextmanager
    def _hint_of_a_crash(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if self._partial is not None:
                logger.error("%s has the finished requests", printable(str(self._partial.path)))
            raise

    def _write(self, engine: LLMEngine, passes: Sequence[Pass]) -> str | None:
        """Write the files that are requested. Return the error, or None."""
        run, run_path = self._settings.run, self._settings.run.run_results_path
        counts = run_results(engine, passes, self._loaded.name)
        try:
            if run.output_path is not None:
                asked = (passes, self._entries, run.output_every_n_results)
                is_full = run.output_format == FULL_FORMAT
                results = full_results(counts, *asked) if is_full else megatron_results(*asked)
                write_results(run.output_path, written(results, run))
                if self._partial is not None:
                    self._partial.remove()
                    self._partial = None
            if run_path is not None:
                write_results(run_path, without_throughput(counts, run), RUN_OUTPUT_FLAG)
        except OutputError as error:
            if self._partial is None:  # the requests are written
                return str(error)
            return f"{error}; {self._partial.path} has the part that could be written"
        return None

    def _where(self, problem: str | None) -> str | None:
        """Say which results are in a file; None if none are."""
        run = self._settings.run
        if problem or run.output_path is None:
            return None
        is_all = run.inference_repeat_n == 1 or run.output_format == FULL_FORMAT
        return f"{'all' if is_all else 'results of the last pass'} are in {printable(run.output_path)}"

    def _end_if_asked(self, passes: Sequence[Pass], problem: str | None) -> None:
        """End here if a signal has come; from now on a signal ends the program at once, since all results are saved.

        Results that are in no file are printed first.
        """
        where = self._where(problem)
        if self._interruption.is_asked:
            if where is None:
                print_report(passes, self._console, None, self._prompt_text)
            counts = Counter(record.status for record in _records(passes))
            ends = ", ".join(f"{counts[status]} {status.name.lower()}" for status in Status if counts[status])
            place = where or problem or "without --output-path they are printed only"
            self._interruption.release(f"requests: {ends}; {place}")
        self._interruption.release(where or "the signal arrived while results were printed")


def _records(passes: Sequence[Pass]) -> list[RequestRecord]:
    return [record for one in passes for record in one.records]
