"""Direct mode on several ranks: every rank calls `generate`, and the engine of the first rank serves them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams

from megatron_ext.apis.generation import Prompt
from megatron_ext.errors import ConfigError
from megatron_ext.mcore import platform
from megatron_ext.mcore.inference_request import DynamicInferenceRequest

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
            prompts: Prompts of this rank.
            params: Parameters of this rank's prompts.
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
