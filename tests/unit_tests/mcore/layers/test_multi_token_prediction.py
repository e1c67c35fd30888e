"""SP-8: hidden states of multi-token prediction."""

from __future__ import annotations

import dataclasses

import torch

from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.multi_token import build_predicting, whole, with_prediction


@torch.inference_mode()
def test_depths_are_those_of_the_formula():
    """SP-8: each depth joins the embedding of a further token and the state before; the last layer is repeated."""
    config = dataclasses.replace(with_prediction("attention_only"), mtp_num_layers=2, mtp_use_repeated_layer=False)
    model, tokens = build_predicting("attention_only", config), make_prompt(9)
    hidden, embedded, angles = whole(model, tokens)
    depths = model.mtp(torch.tensor([tokens], device=hidden.device), hidden, lambda *_: embedded, 3, angles)
    for depth, (number, found) in enumerate(zip([0, 1, 1], depths, strict=True), 1):
        layer, count = model.mtp.layers[number], len(tokens) - depth
        joined = torch.cat((layer.enorm(embedded[depth:]), layer.hnorm(hidden[:count])), dim=-1)
        rotated = None if angles is None else angles[:count]
        hidden = layer.final_layernorm(layer.mtp_model_layer(layer.eh_proj(joined)[0], None, None, rotated))
        torch.testing.assert_close(found, hidden)
