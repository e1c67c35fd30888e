"""Dynamic engine of megatron-core 0.19.2, with the settings that suit it best, and its measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.inference.apis.llm import MegatronLLM
from megatron.core.inference.config import (
    AsyncScheduleMode,
    InferenceConfig,
    MambaInferenceStateConfig,
    PrefixCachingEvictionPolicy,
)
from megatron.core.inference.sampling_params import SamplingParams
from torch import nn

from benchmarks.gpu.peer import Job
from benchmarks.gpu.work import Prompt, Work

BLOCK = 256  # its default; flash-attn 2 takes multiples of it
SPARE = 96  # snapshots of states that its cache may keep
MAX_REQUESTS = 64
GIB = 1024**3


class Ids:
    """Tokenizer for prompts that are ids; the peer asks for a text after each request."""

    eod, bos = -1, None

    def __init__(self, vocabulary: int) -> None:
        self.vocab_size = vocabulary

    def tokenize(self, text: str) -> list[int]:
        """Return the ids in a text such as "1 2"."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Join ids with spaces: the inverse of `tokenize`."""
        return " ".join(map(str, ids))


def settings(model: nn.Module, job: Job, schedule: AsyncScheduleMode) -> InferenceConfig:
    """Return settings with prefix caching, room for all requests, and the default number of graphs.

    A step may hold the longest prompt, so that none is cut; eight of them are one step each.
    """
    work, states = job.work, getattr(torch, job.states)
    recurrent = MambaInferenceStateConfig.from_model(model, ssm_states_dtype=states)
    assert recurrent is not None, "the model has Mamba layers"
    requests = min(MAX_REQUESTS, max(*work.counts, *work.decodes, 4))
    tokens = BLOCK * math.ceil((max(work.prefixes) + BLOCK) / BLOCK)
    slots = SPARE + min(tokens // BLOCK, 3 * requests)  # and what a step keeps until it has been committed
    return InferenceConfig(
        block_size_tokens=BLOCK,
        buffer_size_gb=max(1, math.ceil(_bytes(model, recurrent, work, requests) / GIB)),
        mamba_inference_state_config=recurrent,
        max_requests=requests,
        max_tokens=tokens,
        max_sequence_length=BLOCK * math.ceil((work.longest + BLOCK) / BLOCK),
        num_cuda_graphs=16 if job.graphs else None,
        cuda_graph_max_tokens=job.graph_tokens,
        enable_prefix_caching=True,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        prefix_caching_mamba_gb=slots * _state_bytes(recurrent) / GIB,
        async_sched_mode=schedule,
    )


def _state_bytes(recurrent: MambaInferenceStateConfig) -> int:
    """Return the bytes of all recurrent states of one request."""
    convolution = math.prod(recurrent.conv_states_shape) * recurrent.conv_states_dtype.itemsize
    state = math.prod(recurrent.ssm_states_shape) * recurrent.ssm_states_dtype.itemsize
    return recurrent.layer_type_list.count("M") * (convolution + state)


def _bytes(model: nn.Module, recurrent: MambaInferenceStateConfig, work: Work, requests: int) -> int:
    """Return the bytes of running states and of KV for four times the concurrent tokens (three in ours)."""
    config = model.config
    token = 2 * config.num_query_groups * config.kv_channels * config.params_dtype.itemsize
    blocks = max(
        max(work.counts) * math.ceil(max(work.prefixes) / BLOCK + 2),
        max(work.decodes) * math.ceil((work.context + work.generated) / BLOCK + 2),
    )
    keys = recurrent.layer_type_list.count("*") * token * BLOCK * 4 * blocks
    return keys + requests * _state_bytes(recurrent) + GIB // 64


class Peer:
    """Engine of megatron-core 0.19.2. Args: see `settings`."""

    def __init__(self, model: nn.Module, job: Job, schedule: AsyncScheduleMode) -> None:
        self._engine = MegatronLLM(
            model=model,
            tokenizer=Ids(job.work.vocabulary),
            inference_config=settings(model, job, schedule),
            use_coordinator=False,
        ).engine
        self._next = 0

    def serve(self, prompts: Sequence[Prompt]) -> None:
        """Serve prompts until each has one token."""
        self._add(prompts, 1)
        while self._engine.has_unfinished_requests():
            self.step()

    def decode(self, prompts: Sequence[Prompt], count: int) -> None:
        """Queue requests for `count` tokens, and step until all of them decode."""
        self._add(prompts, count)
        names = range(self._next - len(prompts), self._next)
        while any(not self._engine.get_request(name).generated_tokens for name in names):
            self.step()

    def step(self) -> None:
        """Run one step."""
        self._engine.step_modern()

    def finish(self) -> None:
        """Step until no request is left."""
        while self._engine.has_unfinished_requests():
            self.step()

    def skipped(self) -> int:
        """Return the prompt tokens that the cache has saved so far."""
        return int(self._engine._prefill_tokens_skipped)

    def _add(self, prompts: Sequence[Prompt], count: int) -> None:
        for one in prompts:
            params = SamplingParams(top_k=1, num_tokens_to_generate=count, termination_id=-1)
            self._engine.add_request(self._next, one, params)
            self._next += 1
