"""SP-13, SP-15, SP-16: drafts of multi-token prediction on several ranks are those of one rank.

All counts show it, and the logits of each draft, since verification hides wrong drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
from torch import nn

from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.mcore import assemble
from megatron_ext.ops.linear import onednn
from megatron_ext.scheduling.record import Status
from megatron_ext.speculation.adaptive import DraftCosts
from megatron_ext.speculation.drafting import Drafting
from tests.unit_tests.support import parallel_contexts
from tests.unit_tests.support.multi_token import (
    Logits,
    build_predicting,
    difference,
    watched,
    with_prediction,
)
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_same, assert_same_record, live
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.scenario import ACTIONS, everything, part_of, with_vocabulary
from tests.unit_tests.support.spread import Whole, whole_parameters

TENSOR, PIPELINE = ParallelConfig(tensor_model_parallel_size=2), ParallelConfig(pipeline_model_parallel_size=2)
BOTH = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
LAYOUTS = {"tensor": (TENSOR, 2), "pipeline": (PIPELINE, 2), "both": (BOTH, 4)}
UNTIED = {"untie_embeddings_and_output_weights": True}
POSITIONS = {"position_embedding_type": "learned_absolute"}
DEPTHS = {"mtp_num_layers": 4, "mtp_use_repeated_layer": False}
# Kind of the trunk, fields of the model, layout, drafts, mode of the cache: lives of each kind and form of a model.
FORMS = {
    "hybrid-tensor": ("hybrid", {}, "tensor", 3, "kernel"),
    "gated_delta_net-pipeline": ("gated_delta_net", {}, "pipeline", 3, "kernel"),
    "mamba1-tensor": ("mamba1", {}, "tensor", 3, "kernel"),
    "untied-pipeline": ("hybrid", UNTIED, "pipeline", 1, "kernel"),
    "untied-both": ("attention_only", UNTIED, "both", 4, "off"),
    "untied_positions-pipeline": ("short_conv", UNTIED | POSITIONS, "pipeline", 3, "kernel"),
    "depths-tensor": ("hybrid", DEPTHS, "tensor", 3, "kernel"),
    "untied_depths-pipeline": ("attention_only", DEPTHS | UNTIED, "pipeline", 4, "align"),
}
SMOKE = ("hybrid-tensor", "untied-pipeline")

BACKEND = onednn.NAME if onednn.problem() is None else "auto"  # packs all, or as the table says


def config_of(kind: str, fields: dict[str, object]) -> ModelConfig:
    return dataclasses.replace(with_vocabulary(with_prediction(kind)), **fields)


def script_of(mode: str, *, is_whole: bool, drafts: int = 3) -> Script:
    """A life with drafts: the first third has hits, a snapshot's restore, chunks, scores and an abort."""
    script = dataclasses.replace(everything(mode), mtp=drafts)
    return script if is_whole else dataclasses.replace(script, actions=ACTIONS[:13])


def live_watched(
    parallel: ParallelConfig | None,
    config: ModelConfig,
    whole: Whole,
    script: Script,
    damage: Callable[[nn.Module], None] | None = None,
) -> tuple[Lived, Logits]:
    """`live`, and the logits of this rank's drafts; `damage` is for the model of each rank."""
    fill = parallel_contexts.fill

    def damaged(model: nn.Module, whole: Whole) -> None:
        fill(model, whole)
        if damage is not None:
            damage(model)

    with watched() as kept, mock.patch.object(parallel_contexts, "fill", damaged):
        return live(parallel, config, whole, script), kept


CASES = [
    *(pytest.param(name, False, id=f"{name}-short", marks=pytest.mark.worlds(smoke=True)) for name in SMOKE),
    *(pytest.param(name, True, id=name, marks=pytest.mark.worlds) for name in FORMS),
]


@pytest.mark.parametrize(("name", "is_whole"), CASES)
def test_ranks_draft_as_one(name, is_whole):
    """SP-13, SP-15, SP-16: tokens, log-probs, drafted, accepted and skipped tokens, all counters, drafts' logits."""
    kind, fields, layout, drafts, mode = FORMS[name]
    config, script = config_of(kind, fields), script_of(mode, is_whole=is_whole, drafts=drafts)
    whole = whole_parameters(build_predicting(kind, config))
    alone, expected = live_watched(None, config, whole, script)
    parallel, ranks = LAYOUTS[layout]
    (lived, first), *others = run_ranks(live_watched, ranks, parallel, config, whole, script)
    assert_same(lived, alone)
    assert lived.counters.accepted > 5
    last_stage = [logits for logits in (first, *(logits for _, logits in others)) if logits]
    assert len(last_stage) == parallel.tensor_model_parallel_size
    for logits in last_stage:
        assert difference(logits, expected) < 1e-4
    for other, _ in others:
        assert (other.counters.drafted, other.counters.accepted) == (alone.counters.drafted, alone.counters.accepted)


def without_words(model: nn.Module) -> None:
    """Zero the last stage's copy of the embedding of tokens."""
    if not model.pre_process:
        model.embedding.word_embeddings.weight.data.zero_()


def without_positions(model: nn.Module) -> None:
    """Zero the last stage's copy of learned positions."""
    if not model.pre_process:
        model.embedding.position_embeddings.weight.data.zero_()


@pytest.mark.worlds
@pytest.mark.parametrize("damage", [without_words, without_positions])
def test_drafts_read_the_copy_of_the_embedding(damage):
    """SP-15: a negative control of the logits above; the tokens do not change."""
    config, script = config_of("hybrid", UNTIED | POSITIONS), script_of("kernel", is_whole=False)
    whole = whole_parameters(build_predicting("hybrid", config))
    alone, expected = live_watched(None, config, whole, script)
    (lived, _), (_, logits) = run_ranks(live_watched, 2, PIPELINE, config, whole, script, damage)
    for name, record in alone.records.items():
        if record.status is Status.COMPLETED:  # where others end differs
            assert lived.records[name].generated_tokens == record.generated_tokens
    assert logits[0][0] == expected[0][0]
    assert (logits[0][1] - expected[0][1]).abs().max() > 0.01


@pytest.mark.worlds
@pytest.mark.parametrize("fields", [{}, UNTIED], ids=["tied", "untied"])
def test_rows_of_packed_weights_are_read(fields):
    """SP-15, SC-12: the last stage reads rows of an output layer that is packed."""
    config, script = config_of("hybrid", fields), script_of("kernel", is_whole=False)
    script = dataclasses.replace(script, packs_weights=True, batching={**script.batching, "operator_backend": BACKEND})
    whole = whole_parameters(build_predicting("hybrid", config))
    alone, expected = live_watched(None, config, whole, script)
    (lived, _), (_, logits) = run_ranks(live_watched, 2, PIPELINE, config, whole, script)
    assert_same(lived, alone)
    assert difference(logits, expected) < 1e-4


@pytest.mark.worlds
@pytest.mark.parametrize("fields", [{}, DEPTHS], ids=["one_layer", "depths"])
def test_replicas_draft_for_their_own(fields):
    """SP-13, SP-16: each replica drafts as an engine of its own."""
    config = config_of("hybrid", fields)
    script = dataclasses.replace(script_of("kernel", is_whole=False), takes_turns=True)
    whole = whole_parameters(build_predicting("hybrid", config))
    lived, _ = run_ranks(live, 2, ParallelConfig(), config, whole, script)
    for replica in range(2):
        alone = live(None, config, whole, part_of(script, replica, 2))
        for name, record in alone.records.items():
            assert_same_record(lived.records[name], record)
    assert lived.counters.accepted > 5


def live_measured(
    parallel: ParallelConfig | None, config: ModelConfig, whole: Whole, script: Script, costs: DraftCosts | None = None
) -> tuple[Lived, DraftCosts | None]:
    """`live`, and the costs that were measured; given ones are used without a measurement."""
    found: list[DraftCosts] = []
    use = Drafting.use

    def watched_use(self: Drafting, new: DraftCosts) -> None:
        found.append(new)
        use(self, new)

    measure = assemble.measure_costs if costs is None else lambda _, drafting: drafting.use(costs)
    with mock.patch.object(Drafting, "use", watched_use), mock.patch.object(assemble, "measure_costs", measure):
        lived = live(parallel, config, whole, script)
    assert len(found) <= 1
    return lived, next(iter(found), None)


@pytest.mark.worlds
def test_measured_costs_are_those_of_all_ranks():
    """SP-17: after a measurement on several ranks all of them have the drafts of one rank with the same costs."""
    config, script = config_of("hybrid", UNTIED | DEPTHS), script_of("kernel", is_whole=False)
    script = dataclasses.replace(script, speculation={"speculative_adaptive": True})
    whole = whole_parameters(build_predicting("hybrid", config))
    (lived, costs), *others = run_ranks(live_measured, 2, PIPELINE, config, whole, script)
    assert costs is not None
    alone, _ = live_measured(None, config, whole, script, costs)
    assert_same(lived, alone)
    for other, measured in others:
        assert measured is None
        assert (other.counters.drafted, other.counters.accepted) == (alone.counters.drafted, alone.counters.accepted)
