"""Engine of `MegatronLLM` on the rank that takes requests: its states, from start to shutdown."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.apis.generation import Generation, Prompt, conversion_for, make_requests
from megatron_ext.apis.http_frontend import HttpFrontend
from megatron_ext.apis.inference_config import EngineOptions
from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.apis.state_log import State, StateLog
from megatron_ext.apis.views import EngineView, context_facts
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.errors import EngineClosed, RankError
from megatron_ext.mcore.inference_request import DynamicInferenceRequest
from megatron_ext.text.tokenizer import Tokenizer


class EngineRuntime:
    """Engine with its lifecycle; all methods may be called from any thread.

    Args:
        loaded: Engine, which is closed with the runtime.
        options: Options of the engine.
        tokenizer: Tokenizer as the caller gave it.
        log: Log of the states for the other ranks; None without any.

    Attributes:
        engine: View of the engine.
        ended: Done when the runtime has been closed; has the error if other ranks were lost before.
    """

    def __init__(
        self, loaded: LoadedEngine, options: EngineOptions, tokenizer: Tokenizer, log: StateLog | None = None
    ) -> None:
        self._loaded = loaded
        self._options = options
        self._log = log
        self._state = State.RUNNING
        self._changing = threading.Lock()  # the state, the frontend
        self._frontend: HttpFrontend | None = None
        self._baseline = StepCounts()
        self.ended: Future[None] = Future()
        self._conversion = conversion_for(loaded, has_pause_events=options.has_pause_events)
        facts = context_facts(loaded)
        self.engine = EngineView(facts, tokenizer, self, loaded.inference_engine.capture_stats)
        if log is not None:
            log.publish(facts)

    # Requests

    def begin(self, prompts: Sequence[Prompt], params: SamplingParams) -> Generation:
        """Submit prompts.

        Raises:
            ConfigError: A prompt or a parameter is invalid.
            EngineClosed: The engine is closed.
        """
        requests = make_requests(
            prompts,
            params,
            self._loaded.tokenize,
            self._loaded.limits.max_model_len,
            has_token_events=self._options.has_token_events,
        )
        return Generation(self._loaded.client, requests, params, self._conversion)

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[DynamicInferenceRequest]:
        """Serve prompts to the end; raises the errors of `begin` and of `Generation.wait`."""
        return self.begin(prompts, params).wait() if prompts else []

    # Lifecycle

    def pause(self) -> None:
        """Stop stepping; requests wait. Does nothing if the engine does not run.

        Raises:
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._state is State.RUNNING:
                self._loaded.pause_generation()
                self._become(State.PAUSED)

    def unpause(self) -> None:
        """Continue to step. Does nothing if the engine runs.

        Raises:
            RuntimeError: The engine is suspended.
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._state is State.SUSPENDED:
                raise RuntimeError("the engine is suspended; call resume() before unpause()")
            if self._state is State.PAUSED:
                self._loaded.resume_generation()
                self._become(State.RUNNING)

    def suspend(self) -> None:
        """Suspend a paused engine, at the level of its options.

        Raises:
            RuntimeError: The engine is not paused.
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._state is State.RUNNING:
                raise RuntimeError("the engine runs; call pause() before suspend()")
            if self._state is State.PAUSED:
                self._loaded.suspend()
                self._become(State.SUSPENDED)

    def resume(self) -> None:
        """Allocate the pools again; the engine is paused then. Does nothing if it is not suspended.

        Raises:
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._state is State.SUSPENDED:
                self._loaded.resume()
                self._become(State.PAUSED)

    def serve(self, config: ServeConfig) -> None:
        """Start the HTTP server, and return when it listens.

        Raises:
            ConfigError: The address cannot be bound, or an option is not supported.
            RuntimeError: There is a server already.
            EngineClosed: The engine is closed.
        """
        with self._changing:
            self._check_open()
            if self._frontend is not None:
                raise RuntimeError(f"the HTTP server runs already, at {self._frontend.url}; call shutdown() first")
            self._frontend = HttpFrontend(self._loaded, config, self._note_lost_ranks)

    def _note_lost_ranks(self, error: RankError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def close(self) -> None:
        """Stop the server and the engine, and free all resources. Further calls wait for the first one."""
        with self._changing:
            if self._state is State.STOPPED:
                return
            try:
                if self._frontend is not None:
                    self._frontend.stop()
            finally:
                self._become(State.STOPPED)
                try:
                    self._loaded.close()
                finally:
                    if not self.ended.done():
                        self.ended.set_result(None)

    def _become(self, state: State) -> None:
        self._state = state
        if self._log is not None:
            self._log.write(state)

    def _check_open(self) -> None:
        if self._state is State.STOPPED:
            raise EngineClosed("the engine has been shut down; make a new one")

    # Counts

    def progress(self) -> StepCounts:
        """Return the counts since the last reset, or those at the end of a closed engine."""
        return self._loaded.counts()[1] - self._baseline

    def reset(self) -> None:
        """Abort all requests, empty the prefix cache, and count from zero."""
        self._baseline = self._loaded.reset()
