"""MR-1: sizes against the world and the model, each mistake in one line with both numbers and what would work."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.layout import check_model, check_world, share_of, split_layers
from megatron_ext.parallel.world import (
    World,
    environments_of_ranks,
    is_first_rank,
    ranks_on_this_machine,
    world_of_environment,
)


def sizes(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


HYBRID = ModelConfig(
    hybrid_override_pattern="M-*-",
    hidden_size=96,
    ffn_hidden_size=144,
    num_attention_heads=12,
    num_query_groups=6,
    mamba_head_dim=8,
    mamba_num_heads=24,
    mamba_num_groups=12,
    vocab_size=48,
)
MOE = {"hybrid_override_pattern": "M*E", "num_experts": 6, "moe_ffn_hidden_size": 40}
MOE |= {"moe_shared_expert_intermediate_size": 36}
EXPERTS = dataclasses.replace(HYBRID, **MOE)


class TestWorlds:
    @pytest.mark.parametrize(
        ("parallel", "world"),
        [
            (sizes(), 1),
            (sizes(), 8),
            (sizes(tp=2), 2),
            (sizes(tp=2, pp=2), 8),
            (sizes(tp=2, ep=2), 4),
            (sizes(tp=2, ep=2, etp=1), 2),
            (sizes(pp=2, ep=2), 4),
        ],
    )
    def test_sizes_that_divide_the_world(self, parallel, world):
        check_world(parallel, world)

    @pytest.mark.parametrize(
        ("parallel", "world", "words"),
        [
            (sizes(tp=2), 3, ["started on 3 ranks", "--tensor-model-parallel-size 2", "2, 4 or another multiple of 2"]),
            (sizes(tp=2, pp=3), 8, ["started on 8", "--pipeline-model-parallel-size 3", "needs 6"]),
            (sizes(tp=2, ep=2), 2, ["started on 2 ranks", "--expert-model-parallel-size 2", "needs 4"]),
            (sizes(tp=4, ep=3, etp=2), 12 + 4, ["started on 16", "needs 12"]),
        ],
    )
    def test_sizes_that_do_not_divide_the_world(self, parallel, world, words):
        with pytest.raises(ConfigError) as error:
            check_world(parallel, world)
        assert all(word in str(error.value) for word in words), error.value

    def test_alone_is_told_how_to_start(self):
        with pytest.raises(ConfigError) as error:
            check_world(sizes(tp=2, pp=2), 1, is_launched=False, program="tools/run_inference.py")
        line = (
            "torchrun --nproc-per-node 4 tools/run_inference.py --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2"
        )
        assert str(error.value).endswith(line)


class TestEnvironment:
    def test_nothing_said(self):
        assert world_of_environment({}) == World(0, 1, is_launched=False)
        assert is_first_rank({})

    def test_torchrun(self):
        variables = {"RANK": "3", "WORLD_SIZE": "4"}
        assert world_of_environment(variables) == World(3, 4, is_launched=True)
        assert not is_first_rank(variables)

    @pytest.mark.parametrize(
        ("said", "ranks"), [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "x"}, 1)]
    )
    def test_counts_the_ranks_on_this_machine(self, said, ranks):
        assert ranks_on_this_machine(said) == ranks

    def test_describes_a_world_over_two_nodes(self):
        """RP-6: ranks that Ray places get what torchrun would give them: their world, and those of their machine."""
        worlds = environments_of_ranks(["a", "b", "a"], "10.0.0.1", 4242)
        assert [world_of_environment(one) for one in worlds] == [World(rank, 3, is_launched=True) for rank in range(3)]
        assert [ranks_on_this_machine(one) for one in worlds] == [2, 1, 2]
        assert [one["LOCAL_RANK"] for one in worlds] == ["0", "0", "1"]
        assert {(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in worlds} == {("10.0.0.1", "4242")}

    @pytest.mark.parametrize("variables", [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x"}, {"WORLD_SIZE": "-1"}])
    def test_nonsense(self, variables):
        with pytest.raises(ConfigError, match="the environment says RANK="):
            world_of_environment(variables)


class TestModels:
    @pytest.mark.parametrize(
        ("parallel", "config"),
        [
            (sizes(tp=1, pp=4), HYBRID),
            (sizes(tp=6), HYBRID),
            (sizes(tp=12), HYBRID),  # two ranks a query group
            (sizes(tp=4), dataclasses.replace(HYBRID, num_query_groups=2)),  # as above
            (sizes(tp=6, ep=6, etp=2), EXPERTS),
            (sizes(tp=16), ModelConfig(hybrid_override_pattern="MM", num_attention_heads=1, mamba_num_groups=16,
                                       mamba_num_heads=16, vocab_size=16)),  # heads of no layer
        ],
    )  # fmt: skip
    def test_layouts_that_fit(self, parallel, config):
        check_model(parallel, config)

    @pytest.mark.parametrize(
        ("parallel", "changes", "words"),
        [
            (sizes(tp=5), {}, ["12 Mamba groups", "--tensor-model-parallel-size 5", "1, 2, 3, 6, 12"]),
            (sizes(tp=8), {"mamba_num_groups": 24}, ["12 attention heads", "-parallel-size 8"]),
            (sizes(tp=4), {"num_query_groups": 6}, ["6 query groups", "-parallel-size 4", "1, 2, 3, 6, 12"]),
            (sizes(tp=2), {"mamba_num_groups": 1}, ["1 Mamba groups", "-parallel-size 2", "can be split over 1"]),
            (sizes(tp=2), {"ffn_hidden_size": 145}, ["145 channels inside an MLP (--ffn-hidden-size)"]),
            (sizes(tp=2), {"recurrent_layer": "mamba1", "mamba_inner_size": 5}, ["5 channels of a Mamba-1 layer"]),
            (
                sizes(tp=2),
                {"recurrent_layer": "gated_delta_net", "linear_num_key_heads": 3, "linear_num_value_heads": 6},
                ["3 key heads of a gated delta net"],
            ),
            (sizes(pp=5), {}, ["4 layers", "--pipeline-model-parallel-size 5", "at most 4"]),
            (sizes(ep=2), {}, ["--expert-model-parallel-size 2", "'M-*-' has no MoE layer"]),
            (sizes(ep=4), MOE, ["6 experts", "--expert-model-parallel-size 4", "1, 2, 3, 6"]),
            (sizes(tp=6), MOE, ["40 channels inside an expert", "--expert-tensor-parallel-size 6"]),
            (sizes(tp=2), MOE | {"moe_shared_expert_intermediate_size": 35}, ["35 channels inside the shared experts"]),
        ],
    )  # fmt: skip
    def test_layouts_that_do_not_fit(self, parallel, changes, words):
        with pytest.raises(ConfigError) as error:
            check_model(parallel, dataclasses.replace(HYBRID, **changes))
        assert all(word in str(error.value) for word in words), error.value

    def test_experts_with_biases_are_whole(self):
        biased = dataclasses.replace(EXPERTS, disable_bias_linear=False, moe_shared_expert_intermediate_size=None)
        check_model(sizes(tp=2, etp=1), biased)
        with pytest.raises(ConfigError, match=r"over 2 ranks, and experts have biases; .*-tensor-parallel-size 1"):
            check_model(sizes(tp=2), biased)


# Stages, and the share of a model that a rank holds


def counts(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[int]:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    return [len(stage) for stage in split_layers(layers, parallel)]


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ((5, 2), [3, 2]),
        ((11, 4), [3, 3, 3, 2]),
        ((10, 4), [3, 3, 2, 2]),
        ((5, 2, None, 1), [4, 1]),
        ((5, 2, 2, 3), [2, 3]),
        ((10, 4, 1), [1, 3, 3, 3]),
        ((11, 4, 1, 2), [1, 4, 4, 2]),
        ((12, 5, None, 1), [3, 3, 3, 2, 1]),
    ],
)
def test_counts(given_sizes, expected):
    assert counts(*given_sizes) == expected


@given(st.integers(1, 60), st.integers(1, 12), st.none() | st.integers(1, 60), st.none() | st.integers(1, 60))
def test_no_layer_vanishes(layers, stages, first, last):
    """Splits keep every layer; a model that cannot be split is refused."""
    if stages == 1:
        first = last = None
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    others = stages - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    possible = left == 0 if others == 0 else left >= others
    if not possible:
        with pytest.raises(ConfigError):
            split_layers(layers, parallel)
        return
    split = split_layers(layers, parallel)
    assert [number for stage in split for number in stage] == list(range(layers))
    assert all(len(stage) > 0 for stage in split)
    assert first in (None, len(split[0]))
    assert last in (None, len(split[-1]))
    own = [len(stage) for stage in split][first is not None : stages - (last is not None)]
    assert own == sorted(own, reverse=True)
    assert not own or own[0] - own[-1] <= 1


@pytest.mark.parametrize(
    ("given_sizes", "words"),
    [
        ((3, 4), ["3 layers", "--pipeline-model-parallel-size 4", "at most 3"]),
        ((5, 2, 5), ["first-pipeline-stage 5", "5 layers", "leave 0 for 1 other", "at most 4"]),
        ((6, 2, 2, 3), ["first-pipeline-stage 2", "last-pipeline-stage 3", "are 5 of 6 layers", "must be 6"]),
        ((9, 4, 4, 4), ["leave 1 for 2 other stages", "at most 7"]),
    ],
)
def test_refuses_invalid_stages(given_sizes, words):
    with pytest.raises(ConfigError) as error:
        counts(*given_sizes)
    assert all(word in str(error.value) for word in words), error.value


def share(pattern: str, index: int, **sizes: int):
    return share_of(ParallelConfig(**sizes), ModelConfig(hybrid_override_pattern=pattern), index)


def test_one_rank_holds_everything():
    whole = share("M-*-", 0)
    assert (whole.pattern(ModelConfig(hybrid_override_pattern="M-*-")), whole.is_first, whole.is_last) == (
        "M-*-",
        True,
        True,
    )
    assert not whole.needs_layer_layout


@pytest.mark.parametrize(
    ("layers", "sizes", "said"),
    [
        (5, {"pipeline_model_parallel_size": 2}, {"num_layers_in_first_pipeline_stage": 3}),
        (8, {"pipeline_model_parallel_size": 3}, {"num_layers_in_last_pipeline_stage": 2}),
        (
            9,
            {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2}
            | {"num_layers_in_last_pipeline_stage": 4},
            {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 4},
        ),
        (6, {"pipeline_model_parallel_size": 4}, {"pipeline_model_parallel_layout": "Ett|tt|t|tL"}),
    ],
)
def test_boundaries(layers, sizes, said):
    fields = share("M" * layers, 0, **sizes).core_fields
    names = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    assert {name: fields[name] for name in names if name in fields} == said
    if "pipeline_model_parallel_layout" in said:
        layout = PipelineParallelLayerLayout(said["pipeline_model_parallel_layout"], 4)
        layout.validate_layer_layout(layers, None)
        held = [layout.get_layer_id_list(pp_rank=rank) for rank in range(4)]
        assert held == [list(share("M" * layers, rank, **sizes).stage) for rank in range(4)]
