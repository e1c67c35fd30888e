"""Acceptance of a multi-token prediction layer at depth 1 after a cache hit, by the length of its past.

After a hit the layer's text begins with the first computed token (`speculation/multi_token.py`). The model's own greedy
texts after the example prompts are read again by the layer alone, from the first token of the prompt, and from a few
tokens before its end, as after a hit that leaves so many to compute.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cases import Run, case
from benchmarks.models import engine
from megatron_ext.config import RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.models.build import build_model
from megatron_ext.models.load import LoadedModel, load_model
from megatron_ext.offline.prompts import example_prompts

COMPUTED = (1, 16, 64)  # tokens that a hit leaves to compute
SPANS = (16, 64)  # tokens generated first, beside all of them
SIZES = {"block_count": 64, "max_requests": 8, "max_tokens": 8192, "max_prefills_per_step": 0}


@case("throughput", in_bench=False, quick={"prompts": 1, "tokens": 20})
def draft_context(run: Run, load: str = "", prompts: int = 24, tokens: int = 192) -> None:
    """Accepted share of first drafts by the tokens computed before generation, of the model in `load`."""
    platform.initialize()
    loaded = load_predicting(Path(load) if load else None)
    if loaded.config.mtp_num_layers is None:
        run.remark("the model has no layer of multi-token prediction; a random one shows how long this takes, only")
        loaded = with_random_layer(loaded)
    built = engine(loaded, **SIZES)
    asked = [loaded.tokenizer.tokenize(str(one.content)) for one in example_prompts(RequestParams())]
    pieces = [one[start : start + 200] for one in asked for start in range(0, max(1, len(one) - 200), 200)][:prompts]
    for one in pieces:
        built.add(one, RequestParams(tokens, temperature=0.0, ignore_eos=True))
    records = built.drain()
    texts = [(len(one.prompt_tokens), [*one.prompt_tokens, *one.generated_tokens]) for one in records]
    for computed in (*COMPUTED, None):
        found = torch.stack([hits(loaded.model, text, first, computed) for first, text in texts])
        shares = {f"first {span}": float(found[:, :span].float().mean()) for span in SPANS if span < found.shape[1]}
        name = "whole prompt" if computed is None else f"last {computed}"
        run.row(name, shares | {"all": float(found.float().mean()), "drafts": found.numel()})


@torch.inference_mode()
def hits(model: HybridModel, text: list[int], first: int, computed: int | None) -> Tensor:
    """Return whether the layer's first draft after each generated token but the last is the next one.

    Args:
        model: Model with the layer, on one stage.
        text: Prompt and generated tokens.
        first: Position of the first generated token.
        computed: Tokens of the prompt that were computed; None for all of them.
    """
    assert model.mtp is not None, "the caller has looked"
    ids = torch.tensor([text], device=next(model.parameters()).device)
    embedded = model.embedding(ids, torch.arange(len(text), device=ids.device)[None])
    begin = 1 if computed is None else max(1, first - computed + 1)
    rotary = model.position_embedding_type == "rope"
    hidden = model.decoder(embedded, None, rotary_pos_emb=model.rotary_pos_emb(len(text)) if rotary else None)
    angles = model.rotary_pos_emb(len(text))[: len(text) - begin] if rotary else None
    output = model.mtp.layer_of(1)(hidden[begin - 1 : -1], embedded[begin:], angles=angles)[first - begin : -1]
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    drafts = model.output_layer(output, weight=weight)[0][:, 0].argmax(dim=-1)
    return drafts == ids[0, first + 1 :]


def load_predicting(directory: Path | None, *, reads_prediction: bool = True) -> LoadedModel:
    """Load a model of Hugging Face's layout with its prediction layers, or without; by default the embedded model."""
    source = SourceConfig(load_hf=None if directory is None else str(directory))
    return load_model(source, {}, device=platform.device(), reads_prediction=reads_prediction)


def with_random_layer(loaded: LoadedModel) -> LoadedModel:
    """Return a model with a layer of attention that drafts, of random weights."""
    config = replace(loaded.config, mtp_num_layers=1, mtp_hybrid_override_pattern="*")
    model = build_model(config, device=platform.device())
    own = dict(loaded.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.copy_(own[name])
    return replace(loaded, model=model, config=config)
