"""Costs of drafts of multi-token prediction: steps with K drafts over plain ones, and where their time goes.

A step with drafts pays if it gives more tokens than it costs plain steps; that number is 1 + the sum of the
probabilities that its drafts are accepted. Sizes: the embedded model's, and random models of the standard shapes with a
drafting layer of the same kind as their attention layers. Texts are the same as in `throughput.prediction`; their
acceptance does not matter here, but rejected drafts cost a restored state, as they do there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.cases import Figure, Run, case, token_ids
from benchmarks.measuring import Phases, own_time
from benchmarks.models import random_model, shaped
from benchmarks.peers.sizes import SIZES
from benchmarks.throughput.draft_context import load_predicting, with_random_layer
from benchmarks.throughput.prediction import Arm
from megatron_ext.config import RequestParams
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.controller import InferenceController
from megatron_ext.mcore.multi_token_engine import PredictionLayerDrafter
from megatron_ext.models.load import LoadedModel

PHASES: dict[str, tuple[object, str]] = {
    "trunk": (InferenceController, "forward"),
    "sampling": (InferenceController, "sample"),
    "layer": (PredictionLayerDrafter, "logits"),
}
PROMPT = 64  # tokens


@case("throughput", quick={"requests": (1,), "drafts": (1,), "sizes": ("embedded",), "tokens": 8, "rounds": 1})
def prediction_costs(
    run: Run,
    load: str = "",
    requests: tuple = (1, 8, 32),
    drafts: tuple = (1, 2, 3),
    sizes: tuple = ("embedded", "250m"),
    tokens: int = 32,
    rounds: int = 3,
) -> None:
    """Time of a step with K drafts of a layer over that of a plain one, by the size of the model."""
    platform.initialize()
    for size in sizes:
        arms = {count: _arm(size, count, load) for count in (0, *drafts)}
        for count in requests:
            name = f"{size}, {count} at once"
            run.attempt(name, _comparison(run, name, arms, (count, tokens, rounds)), like=size)


def _model(size: str, load: str, *, predicts: bool) -> LoadedModel:
    if size == "embedded":
        loaded = load_predicting(Path(load) if load else None, reads_prediction=predicts)
        return with_random_layer(loaded) if predicts and loaded.config.mtp_num_layers is None else loaded
    config = shaped(SIZES[size].shape)
    return random_model(replace(config, mtp_num_layers=1, mtp_hybrid_override_pattern="*") if predicts else config)


def _arm(size: str, count: int, load: str) -> Arm:
    speculation = SpeculationConfig("mtp", count, speculative_adaptive=False) if count else NO_SPECULATION
    return Arm.of(f"K = {count}", _model(size, load, predicts=count > 0), speculation)


def _comparison(run: Run, name: str, arms: dict[int, Arm], work: tuple[int, int, int]) -> Callable[[], None]:
    """Return the function that lets engines take turns and reports a row for each number of drafts."""
    requests, tokens, rounds = work

    def measure() -> None:
        found: dict[int, list[dict[str, float]]] = {drafts: [] for drafts in arms}
        for number in range(rounds + 1):
            for drafts, arm in arms.items():
                costs = _step_costs(arm, requests, tokens)
                if number:  # the first round warms up
                    found[drafts].append(costs)
        plain = statistics.median(costs["step"] for costs in found[0])
        for drafts, all_costs in found.items():
            medians = {phase: statistics.median(costs[phase] for costs in all_costs) for phase in all_costs[0]}
            ratios = [one["step"] / other["step"] for one, other in zip(all_costs, found[0], strict=True)]
            figures: dict[str, Figure] = {"step, ms": medians["step"], "over a plain step": statistics.median(ratios)}
            figures |= {f"{phase} / plain step": ms / plain for phase, ms in medians.items() if phase != "step"}
            run.row(f"{name}, K = {drafts}" if drafts else f"{name}, plain", figures)

    return measure


def _step_costs(arm: Arm, requests: int, tokens: int) -> dict[str, float]:
    """Return milliseconds of a step in which all requests decode, and of its phases."""
    vocabulary = arm.inference.controller.vocabulary_size
    params = RequestParams(4 * tokens + 16, temperature=0.0, ignore_eos=True)
    engine = arm.engine
    engine.start_decoding([token_ids(PROMPT, f"costs {i}", vocabulary) for i in range(requests)], params)
    engine.step()  # the layer reads the prompts
    with Phases(own_time).timing(PHASES) as phases:
        start = own_time()
        for _ in range(tokens):
            engine.step()
        whole = 1e3 * (own_time() - start) / tokens
        costs = {"trunk": 0.0, "layer": 0.0, "sampling": 0.0} | phases.per_step(tokens)
    engine.drain()
    return {"step": whole, **costs, "host": whole - sum(costs.values())}
