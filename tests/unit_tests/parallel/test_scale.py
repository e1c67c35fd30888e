"""docs/scale.md: its formulas are what is built and what is sent, and its tables are what the formulas give."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from benchmarks.simulation import scale
from megatron_ext.config import BatchingConfig, ModelConfig, ParallelConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.layer_map import model_shape
from megatron_ext.models.build import build_model
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.parallel import shared_results
from megatron_ext.parallel.layout import Share, share_of
from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Script, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import text, with_vocabulary
from tests.unit_tests.support.source import ROOT
from tests.unit_tests.support.spread import Whole, whole_parameters

DOCUMENT = (ROOT / "docs/scale.md").read_text("utf-8")
TOKENS = 23  # of the one prompt, computed in one step, and one is sampled from
BYTES = 4  # fp32


@pytest.mark.parametrize("name", scale.tables())
def test_the_tables_are_those_of_the_formulas(name):
    """`python -m benchmarks simulation.scale` prints what belongs there."""
    assert scale.tables()[name] in DOCUMENT


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, expert_model_parallel_size=expert
    )


LAYOUTS = {
    "TP 2": (2, sizes(tensor=2)),
    "PP 2": (2, sizes(pipeline=2)),
    "EP 2": (2, sizes(expert=2)),
    "TP 2 x EP 2": (4, sizes(tensor=2, expert=2)),
}
MODELS = {
    "TP 2": ("hybrid", "mamba1", "gated_delta_net", "experts"),
    "PP 2": ("hybrid", "attention_only"),
    "EP 2": ("experts",),
    "TP 2 x EP 2": ("experts",),
}


@dataclass
class Seen:
    """A rank, and what it held and sent.

    Attributes:
        stage: Stage of the rank.
        matrices: Parameters of matrices and convolutions.
        kv: Bytes of a token.
        states: Bytes of a sequence's states.
        sent: Bytes of each call in the step of a prompt, by kind.
    """

    stage: int
    matrices: int
    kv: int
    states: int
    sent: dict[str, list[int]]


def see(parallel: ParallelConfig, models: dict[str, tuple[ModelConfig, Whole]]) -> dict[str, Seen]:
    """Observe one rank."""
    platform.initialize(parallel)
    return {name: see_one(parallel, config, whole) for name, (config, whole) in models.items()}


def see_one(parallel: ParallelConfig, config: ModelConfig, whole: Whole) -> Seen:
    model = build_model(config, device=torch.device("cpu"), parallel=parallel)
    shape = model_shape(model, BatchingConfig(), torch.float32)
    matrices = sum(one.numel() for one in model.parameters() if one.dim() > 1)
    sent: dict[str, list[int]] = defaultdict(list)
    replicas = parallel_state.get_data_parallel_world_size()
    prompts = [("add", i, text(TOKENS, i), {"num_tokens_to_generate": 1}) for i in range(replicas)]
    with counted(sent):
        live(parallel, config, whole, Script(prompts))
    states = 0 if shape.states is None else shape.states.bytes
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return Seen(stage, matrices, shape.kv_bytes_per_token, states, dict(sent))


@contextmanager
def counted(sent: dict[str, list[int]]) -> Iterator[None]:
    """Within it calls of torch.distributed write down the bytes that they put in."""
    world = torch.distributed
    with ExitStack() as stack:

        def watch(owner: object, name: str, kind: str, size: Callable[..., int | None]) -> None:
            call = getattr(owner, name)

            def watched(*arguments: object, **options: object) -> object:
                given = size(*arguments)
                if given is not None:
                    sent[kind].append(given)
                return call(*arguments, **options)

            stack.enter_context(mock.patch.object(owner, name, watched))

        watch(world, "all_reduce", "all-reduce", lambda tensor: tensor.nbytes)
        watch(mappings, "dist_all_gather_func", "gather", lambda _, tensor: tensor.nbytes)
        watch(world, "all_to_all_single", "all-to-all", lambda _, tensor: tensor.nbytes)
        watch(world, "batch_isend_irecv", "stage", sent_to_next_stage)
        watch(shared_results, "broadcast", "tokens", lambda tensor, *_: tensor.nbytes)
        yield


def sent_to_next_stage(operations: list[torch.distributed.P2POp]) -> int | None:
    (one,) = operations
    return one.tensor.nbytes if one.op is torch.distributed.isend else None


def assert_holds(seen: Seen, config: ModelConfig, share: Share) -> None:
    assert seen.matrices == matrix_parameter_count(config, share)
    assert seen.kv == scale.kv_bytes_per_token(config, share, BYTES)
    if config.recurrent_layer == "mamba2":
        assert seen.states == scale.state_bytes(config, share, BYTES)


def assert_sends(seen: Seen, config: ModelConfig, share: Share) -> None:
    sent, m = seen.sent, 1
    reduced = scale.all_reduces(config, share, TOKENS, BYTES)
    assert len(sent.get("all-reduce", [])) == reduced.count
    assert sum(sent.get("all-reduce", [])) == reduced.total
    experts = config.hybrid_override_pattern.count("E") if share.parallel.expert_model_parallel_size > 1 else 0
    counts = [8 * (config.num_experts or 0)] * experts  # how many tokens go to each expert, int64
    logits = scale.logits_gather(config, share, m, BYTES)
    assert sorted(sent.get("gather", [])) == sorted([*counts, *[logits.total] * logits.count])
    assert sent.get("stage", []) == [scale.stage_sends(config, share, TOKENS, BYTES).total] * (not share.is_last)
    assert set(sent["tokens"]) == {scale.TOKEN_BYTES * m}  # once, and on the first rank once for each replica


@pytest.mark.worlds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_give_the_memory_and_traffic_of_ranks(layout):
    size, parallel = LAYOUTS[layout]
    configs = {name: with_vocabulary(CONFIGS[name]) for name in MODELS[layout]}
    models = {name: (config, whole_parameters(build_slow_decay(config))) for name, config in configs.items()}
    ranks = run_ranks(see, size, parallel, models)
    for name, config in configs.items():
        for rank in ranks:
            share = share_of(parallel, config, rank[name].stage)
            assert_holds(rank[name], config, share)
            assert_sends(rank[name], config, share)
        # Of all ranks of a replica together: messages to experts do not depend on their placement.
        expected = [scale.expert_sends(config, share_of(parallel, config, r[name].stage), TOKENS, BYTES) for r in ranks]
        sent = [rank[name].sent.get("all-to-all", []) for rank in ranks]
        assert [len(one) for one in sent] == [one.count for one in expected]
        rows = config.moe_router_topk * TOKENS * config.hybrid_override_pattern.count("E")
        if expected[0].count:
            copies = size // parallel.tensor_model_parallel_size * parallel.expert_tensor_size
            assert sum(map(sum, sent)) == copies * rows * (2 * config.hidden_size * BYTES + 4)


def test_computed_tokens_are_those_not_skipped():
    """A prompt of which nothing is skipped, and the sum of its two halves."""
    config = scale.MODELS["8B"]
    output = 2 * config.vocab_size * config.hidden_size
    whole = scale.prefill_flops(config, 4096, 0)
    halves = scale.prefill_flops(config, 2048, 0) + scale.prefill_flops(config, 4096, 2048)
    assert whole == halves - output
    one_layer = dataclasses.replace(config, hybrid_override_pattern="-")
    matrices = 2 * config.hidden_size * config.ffn_size
    assert scale.prefill_flops(one_layer, 10, 3) == 7 * 2 * matrices + output
