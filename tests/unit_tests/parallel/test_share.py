"""Share of a model that a rank holds, and the settings by which megatron-core learns where stages begin."""

from __future__ import annotations

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.parallel.layout import share_of


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
        (6, {"pipeline_model_parallel_size": 3}, {}),
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
        assert held == [list(share("M" * layers, rank, **sizes).stage.layers) for rank in range(4)]
