"""A layer of multi-token prediction for each depth: each draft is that of its layer over the whole text."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.unit_tests.mcore.test_verification import chat
from tests.unit_tests.support.drafters import assert_same, assert_same_cache, caching
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.multi_token import LAYERS, MODES, build_predicting, drafting, whole, with_prediction


class WatchingLayers:
    """Mixin for drivers of a model with a layer for each depth: the logits of all drafts are kept.

    Args:
        kind: Kind of the model.
        count: K, and the number of layers.
        mode: Mode of snapshots; None turns the cache off.
        settings: Keywords of `Driver`.

    Attributes:
        drafts: Of each draft: request, tokens before it that count, drafts before it, first token that depth 1 has
            read, logits [V].
    """

    def __init__(self, kind: str, count: int, mode: str | None, **settings: object) -> None:
        config = dataclasses.replace(with_prediction(kind), mtp_num_layers=count, mtp_use_repeated_layer=False)
        self.model, self.config = build_predicting(kind, config), config
        super().__init__(self.model, config, cache=caching(mode), speculation=drafting(count), **settings)
        self.drafter = self.context.drafting._layer
        self.drafts: list[tuple[int, int, tuple[int, ...], int, Tensor]] = []
        for depth, layer in enumerate(self.drafter.layers, 1):
            self._watch(depth, layer, layer.logits)

    def _watch(self, depth, layer, compute):
        def logits(step, inputs):
            found = compute(step, inputs)
            for name, row in zip(layer._sampled, found, strict=True):
                if inputs[name].drafts == depth - 1:
                    (chunk,) = (one for one in step.chunks if one.request_id == name)
                    true = inputs[name].position + chunk.length - (depth - 1)
                    first = self.drafter.layers[0]._readers[name].first
                    self.drafts.append((name, true, layer.known[name][: depth - 1], first, row.clone()))
            return found

        layer.logits = logits

    @torch.inference_mode()
    def worst_difference(self) -> float:
        """Largest difference of a draft's logits from those of whole texts."""
        worst, model = 0.0, self.model
        for name, true, known, first, row in self.drafts:
            record = self.records[name]
            text = [*record.prompt_tokens, *record.generated_tokens][:true]
            hidden, embedded, angles = whole(model, [*text, *known])
            hidden = hidden[first - 1 :]
            for depth in range(1, len(known) + 2):
                rest = embedded[first + depth - 1 :]
                layer = model.mtp.layer_of(depth)
                hidden = layer(hidden[: len(rest)], rest, angles=None if angles is None else angles[: len(rest)])
            logits = model.output_layer(hidden[-1:], weight=model.shared_embedding_or_output_weight())[0][0, 0]
            worst = max(worst, float((row - logits).abs().nan_to_num(nan=torch.inf).max()))
        return worst


class Layered(WatchingLayers, Driver):
    """`Driver`, watched."""


def cases() -> list:
    """Every kind, with modes in turns, and 2 to 4 layers; some are quick, a count of each kind is long."""
    found = []
    for i, kind in enumerate(LAYERS):
        for count in (2, 3, 4):
            others = pytest.mark.long if count == 2 + i % 3 else pytest.mark.soak
            marks = () if (kind, count) in (("attention_only", 3), ("short_conv", 2)) else (others,)
            found.append(pytest.param(kind, count, MODES[(i + count) % 3], id=f"{kind}-{count}", marks=marks))
    return found


@pytest.mark.parametrize(("kind", "count", "mode"), cases())
def test_each_depth_has_its_layer(kind, count, mode):
    """SP-14: tokens, states, blocks and counts are those without drafts; logits those of whole texts."""
    driver = Layered(kind, count, mode)
    plain = Driver(driver.model, driver.config, cache=caching(mode))
    chat(driver)
    chat(plain)
    assert_same(driver, plain)
    if mode is not None:
        assert_same_cache(driver, plain)
    assert {len(known) for _, _, known, _, _ in driver.drafts} == set(range(count))
    assert driver.worst_difference() < 1e-4
    driver.drafter.check()
    pools, planned = [one._context.allocated for one in driver.drafter.layers], driver.context.plan.geometry
    tensors = [one.kv for one in pools] + [one._hidden._rows for one in driver.drafter.layers]
    tensors += [
        state for one in pools for pool in (one.live_states, one.snapshots) if pool for state in (pool.conv, pool.ssm)
    ]
    assert sum(one.nbytes for one in tensors) == planned.draft_layers.pool_bytes(planned.blocks)
