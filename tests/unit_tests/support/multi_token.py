"""Models that predict several tokens, and engines of which the logits of all drafts are kept.

Verification hides wrong drafts, so tokens alone cannot show that a layer reads the right hidden states and keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.config.model_fields import LEARNED_POSITIONS
from megatron_ext.config.speculation import SpeculationConfig
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.mcore.multi_token_engine import PredictionLayerDrafter
from tests.unit_tests.support.drafters import caching
from tests.unit_tests.support.driver import Driver
from tests.unit_tests.support.models import CONFIGS, build_slow_decay

# Kind of the trunk -> layers that draft, of which at least one has keys or states.
LAYERS = {"hybrid": "M*-", "gated_delta_net": "M*", "mamba1": "M-", "short_conv": "M", "attention_only": "*-"}
MODES = ["kernel", "align", None]

Logits = list[tuple[tuple[int, ...], Tensor]]  # of each step of a layer: its requests, and a row for each


@cache
def predicting(kind: str) -> HybridModel:
    """A model of a kind, shared between tests that change nothing of it; see `build_predicting`."""
    return build_predicting(kind)


def with_prediction(kind: str) -> ModelConfig:
    """The configuration of a kind, with a layer of multi-token prediction."""
    return dataclasses.replace(
        CONFIGS[kind],
        untie_embeddings_and_output_weights=False,
        mtp_num_layers=1,
        mtp_use_repeated_layer=True,
        mtp_hybrid_override_pattern=LAYERS[kind],
    )


def build_predicting(kind: str, config: ModelConfig | None = None) -> HybridModel:
    """A model that repeats its input, as its layers of multi-token prediction expect it to do, mostly.

    With an output layer of its own it counts instead of repeating: the row of a token is the embedding of the one
    before.
    """
    config = config or with_prediction(kind)
    model = build_slow_decay(config)
    width = config.hidden_size
    with torch.no_grad():
        for layer in model.mtp.layers:
            weight = layer.eh_proj.weight
            weight[:, :width] += 2 * torch.eye(width, device=weight.device)
            weight[:, width:] *= 0.5
        if config.untie_embeddings_and_output_weights:
            words = model.embedding.word_embeddings.weight.mul_(2)
            model.output_layer.weight.copy_(words.roll(1, dims=0))
        if config.position_embedding_type == LEARNED_POSITIONS:
            model.embedding.position_embeddings.weight.mul_(0.2)
    return model


def drafting(count: int, **settings: object) -> SpeculationConfig:
    """Settings for K drafts, whose number is not adapted unless further fields say so."""
    fields = {"speculative_method": "mtp", "num_speculative_tokens": count, "speculative_adaptive": False}
    return SpeculationConfig(**(fields | settings))


class Watching:
    """Mixin for drivers: the logits of all drafts are kept, and the drafter's pools are poisoned.

    Args:
        kind: Kind of the model.
        count: K.
        mode: Mode of snapshots; None turns the cache off.
        model: The model; by default that of `predicting`.
        settings: Keywords of `Driver`.

    Attributes:
        drafts: Of each computed chunk that is sampled from: request, position of its last token, its tokens, number of
            drafts among them, first position that the layer has read, logits [V].
    """

    def __init__(
        self, kind: str, count: int, mode: str | None, model: HybridModel | None = None, **settings: object
    ) -> None:
        model = model or predicting(kind)
        super().__init__(model, CONFIGS[kind], **({"cache": caching(mode), "speculation": drafting(count)} | settings))
        self.model, self.drafter = model, self.context.drafting._layer
        self.drafts: list[tuple[int, int, tuple[int, ...], int, int, Tensor]] = []
        pools = self.drafter._context.allocated
        for pool in (pools.kv, self.drafter._hidden._rows):
            pool.fill_(torch.nan)
        for pool in (pools.live_states, pools.snapshots):
            if pool is not None:
                pool.conv.fill_(torch.nan), pool.ssm.fill_(torch.nan)
        compute = self.drafter.logits

        def logits(step, inputs):
            found = compute(step, inputs)
            sampled = [chunk for chunk in self._in_order(step) if chunk.sampling is not None]
            for chunk, row in zip(sampled, found, strict=True):
                given, name = inputs[chunk.request_id], chunk.request_id
                last = given.position + chunk.length - 1
                first = self.drafter._readers[name].first
                self.drafts.append((name, last, chunk.token_ids, given.drafts, first, row.clone()))
            return found

        self.drafter.logits = logits

    def _in_order(self, step):
        order = {name: number for number, name in enumerate(self.drafter._sampled)}
        return sorted((one for one in step.chunks if one.sampling), key=lambda one: order[one.request_id])


class Watched(Watching, Driver):
    """`Driver`, watched."""


def whole(model: HybridModel, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and embeddings of a whole text, [s, 1, h], and its rotary angles."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    embedded = model.embedding(ids, torch.arange(len(tokens), device=device)[None])
    angles = model.rotary_pos_emb(len(tokens)) if model.position_embedding_type == "rope" else None
    return model.decoder(embedded, None, rotary_pos_emb=angles), embedded, angles


def expected(driver: Watching, texts: Mapping[int, Sequence[int]]) -> list[Tensor]:
    """Logits of each kept draft, each computed from a whole text."""
    model, layer, found = driver.model, driver.model.mtp.layer_of(1), []
    outputs: dict[int, list[Tensor]] = {}  # after the last true token and after each draft
    guessed: dict[int, list[int]] = {}
    for name, last, tokens, drafts, first, _ in driver.drafts:
        outputs[name] = outputs.get(name, [])[:drafts]  # a request may be asked for again without a step
        guessed[name] = [*guessed.get(name, [])[: drafts - 1], tokens[-1]] if drafts else []
        true = texts[name][: last + 1 - len(guessed[name])]
        hidden, embedded, angles = whole(model, [*true, *guessed[name]])
        before = torch.cat([hidden[: len(true) - 1], *outputs[name]])[first - 1 :]
        output = layer(before, embedded[first:], angles=None if angles is None else angles[: len(before)])[-1:]
        outputs[name].append(output)
        found.append(model.output_layer(output, weight=model.shared_embedding_or_output_weight())[0][0, 0])
    return found


@torch.inference_mode()
def worst_difference(driver: Watching, texts: Mapping[int, Sequence[int]] | None = None) -> float:
    """Largest difference of a kept draft's logits from those of whole texts, by default those of all ended requests.

    NaN, of memory that was never written, is larger than any number.
    """
    if texts is None:
        texts = {name: (*one.prompt_tokens, *one.generated_tokens) for name, one in driver.records.items()}
    pairs = zip(driver.drafts, expected(driver, texts), strict=True)
    return float(torch.stack([(one[-1] - other).abs().max() for one, other in pairs]).max())


@contextlib.contextmanager
def watched() -> Iterator[Logits]:
    """Within it the logits of this rank's drafts are kept."""
    kept: Logits = []
    compute = PredictionLayerDrafter.logits

    def logits(self, step, inputs):
        found = compute(self, step, inputs)
        if self._sampled:
            kept.append((self._sampled, found.clone()))
        return found

    with mock.patch.object(PredictionLayerDrafter, "logits", logits):
        yield kept


def difference(one: Logits, other: Logits) -> float:
    """Largest difference between the logits of equal steps."""
    assert [names for names, _ in one] == [names for names, _ in other]
    pairs = zip(one, other, strict=True)
    return float(torch.stack([(left - right).abs().max() for (_, left), (_, right) in pairs]).max())
