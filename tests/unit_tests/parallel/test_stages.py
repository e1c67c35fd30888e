"""MR-1: every layer is on one stage, in order, and no stage is empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.config import ParallelConfig
from megatron_ext.errors import ConfigError
from megatron_ext.parallel.layout import split_layers


def counts(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[int]:
    parallel = ParallelConfig(
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    return [stage.count for stage in split_layers(layers, parallel)]


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ((5, 1), [5]),
        ((5, 2), [3, 2]),
        ((11, 4), [3, 3, 3, 2]),
        ((10, 4), [3, 3, 2, 2]),
        ((4, 4), [1, 1, 1, 1]),
        ((5, 2, 1), [1, 4]),
        ((5, 2, None, 1), [4, 1]),
        ((5, 2, 2, 3), [2, 3]),
        ((10, 4, 1), [1, 3, 3, 3]),
        ((11, 4, 1), [1, 4, 3, 3]),
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
    assert [number for stage in split for number in stage.layers] == list(range(layers))
    assert all(stage.count > 0 for stage in split)
    assert first in (None, split[0].count)
    assert last in (None, split[-1].count)
    own = [stage.count for stage in split][first is not None : stages - (last is not None)]
    assert own == sorted(own, reverse=True)
    assert not own or own[0] - own[-1] <= 1


@pytest.mark.parametrize(
    ("given_sizes", "words"),
    [
        ((3, 4), ["3 layers", "--pipeline-model-parallel-size 4", "at most 3"]),
        ((5, 2, 5), ["first-pipeline-stage 5", "5 layers", "leave 0 for 1 other", "at most 4"]),
        ((6, 2, 2, 3), ["first-pipeline-stage 2", "last-pipeline-stage 3", "are 5 of 6 layers", "must be 6"]),
        ((9, 4, 4, 4), ["leave 1 for 2 other stages", "at most 7"]),
        ((9, 4, 9, 9), ["leave 0 for 2 other stages"]),
    ],
)
def test_refuses_invalid_stages(given_sizes, words):
    with pytest.raises(ConfigError) as error:
        counts(*given_sizes)
    assert all(word in str(error.value) for word in words), error.value
