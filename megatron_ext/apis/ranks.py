"""`MegatronLLM` on several ranks: the other ranks' part of its engine, and direct mode.

The other ranks compute their part of each step. In direct mode every rank calls `generate`, and the engine of the first
rank serves them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.api.engine import EngineFollower
from megatron_ext.apis.http_frontend import ServeConfig
from megatron_ext.apis.runtime import EngineView, Prompt
from megatron_ext.apis.state_log import Change, State, StateLog, StateReader, wait_for
from megatron_ext.errors import ConfigError, EngineClosed, RankError
from megatron_ext.mcore import platform
from megatron_ext.mcore.inference_request import DynamicInferenceRequest
from megatron_ext.text.tokenizer import Tokenizer


class FollowingRuntime:
    """Part of an engine on a rank other than the first, in a thread of its own until the first rank closes the engine.

    Args:
        follower: This rank's part of the engine.

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
        self.engine = EngineView(facts, tokenizer, None)

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

    def change(self, change: Change) -> None:
        """Wait until the first rank has made a change.

        Raises:
            EngineClosed: The first rank closes the engine first.
        """
        with self._changing:
            while self._seen.state is not change.after:
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


def _never() -> bool:
    return False


Results = list[DynamicInferenceRequest]
Serve = Callable[[Sequence[Prompt], SamplingParams], Results]


@dataclass(frozen=True)
class _Call:
    """Call of `generate` on one rank."""

    rank: int
    replica: int
    prompts: Sequence[Prompt]
    params: SamplingParams


class DirectCalls:
    """Calls of `generate` that all ranks make together; all ranks make this object together, too."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, serve: Serve | None) -> Results:
        """Return the results of this rank's prompts.

        The ranks of a replica must give the same prompts; different replicas may have different prompts.

        Args:
            serve: Serves prompts; on the first rank only.

        Raises:
            ConfigError: Ranks of a replica differ, or a prompt or a parameter is invalid; raised on all ranks.
        """
        call = _Call(dist.get_rank(), parallel_state.get_data_parallel_rank(), prompts, params)
        calls: list[_Call] | None = [call] * dist.get_world_size() if serve is not None else None
        dist.gather_object(call, calls, dst=0, group=self._group)
        outcome: list[dict[int, Results] | Exception | None] = [None]
        if serve is not None:
            assert calls is not None, "just made"
            outcome = [_outcome(calls, serve)]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        found = outcome[0]
        if isinstance(found, Exception):
            raise found
        assert found is not None, "the first rank has sent it"
        return [_moved(one, platform.device()) for one in found[call.replica]]


def _outcome(calls: Sequence[_Call], serve: Serve) -> dict[int, Results] | Exception:
    """Return the results of each replica's prompts, or the error that all ranks raise."""
    try:
        first: dict[int, _Call] = {}
        for call in calls:
            other = first.setdefault(call.replica, call)
            if (other.prompts, other.params) != (call.prompts, call.params):
                raise ConfigError(
                    f"ranks {other.rank} and {call.rank} are of one replica and called generate() with different "
                    "prompts or parameters; give the same ones on all its ranks"
                )
        return {
            replica: [_moved(one, "cpu") for one in serve(call.prompts, call.params)] for replica, call in first.items()
        }
    except Exception as error:  # raised on every rank
        return error


def _moved(request: DynamicInferenceRequest, device: object) -> DynamicInferenceRequest:
    request.prompt_tokens = request.remaining_prompt_tokens = request.prompt_tokens.to(device)
    return request
