"""Engine of `MegatronLLM` on the other ranks, which compute their part of each step and take no requests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.apis.state_log import State, StateLog, StateReader, wait_for
from megatron_ext.apis.views import EngineView
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.errors import EngineClosed, RankError
from megatron_ext.mcore import platform
from megatron_ext.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_ext.api.engine import EngineFollower


class FollowingRuntime:
    """Part of an engine on a rank other than the first, in a thread of its own until the first rank closes the engine.

    Methods of the lifecycle wait until the first rank has done the same.

    Args:
        follower: This rank's part of the engine.
        log: States of the engine.
        tokenizer: Tokenizer of the model.

    Attributes:
        engine: View of the engine; its counts stay zero.
        ended: Done when the engine has been closed; has the error if a rank has failed before.

    Raises:
        RankError: The first rank could not start.
    """

    def __init__(self, follower: EngineFollower, log: StateLog, tokenizer: Tokenizer) -> None:
        self._follower = follower
        self._log = log
        self._seen = StateReader(log)  # by the lifecycle's methods
        self._changing = threading.Lock()
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(platform.device(),), name="follow", daemon=True)
        self._thread.start()
        facts = wait_for(log.published, self.ended.done)
        if facts is None:
            raise RankError("the first rank could not start the engine")
        self.engine = EngineView(facts, tokenizer, self)

    def _run(self, device: torch.device) -> None:
        """Follow the first rank, with breaks while the engine is suspended."""
        try:
            if device.type == "cuda":  # otherwise a thread has the first one
                torch.cuda.set_device(device)
            states = StateReader(self._log)
            while not self._follower.is_closed:
                self._follower.follow()
                if not self._follower.is_closed and not self._is_resumed(states):
                    self._follower.close()
        except BaseException as error:  # raised by `wait_for_shutdown`
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _is_resumed(self, states: StateReader) -> bool:
        """Wait until the first rank resumes the suspended engine; return False if it closes it."""
        while states.state is not State.SUSPENDED:
            if states.wait_next(_never) is State.STOPPED:
                return False
        return states.wait_next(_never) is not State.STOPPED

    def pause(self) -> None:
        """Wait until the first rank has paused the engine.

        Raises:
            EngineClosed: The first rank closes the engine first.
        """
        self._wait(State.PAUSED)

    def unpause(self) -> None:
        """Wait until the engine runs; see `pause`."""
        self._wait(State.RUNNING)

    def suspend(self) -> None:
        """Wait until the engine is suspended; see `pause`."""
        self._wait(State.SUSPENDED)

    def resume(self) -> None:
        """Wait until the engine is resumed; see `pause`."""
        self._wait(State.PAUSED)

    def _wait(self, state: State) -> None:
        with self._changing:
            while self._seen.state is not state:
                if self._seen.wait_next(self.ended.done) is State.STOPPED:
                    raise EngineClosed("the engine has been shut down; make a new one")

    def serve(self, config: ServeConfig) -> None:
        """Do nothing: the first rank serves."""

    def close(self) -> None:
        """Wait until the first rank has closed the engine.

        Raises:
            RankError: A rank has failed.
        """
        self.ended.result()

    def progress(self) -> StepCounts:
        """Return zero: the first rank counts."""
        return StepCounts()

    def reset(self) -> None:
        """Do nothing: the first rank resets the engine of all ranks."""


def _never() -> bool:
    return False
