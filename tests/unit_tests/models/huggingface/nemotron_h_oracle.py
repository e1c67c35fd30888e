"""Random tiny NemotronH models made by transformers: an implementation that we did not write.

Slow decay (A of 0.01 to 0.1, steps of 0.01 to 0.05), so that a lost or misread state is visible hundreds of tokens
later, and weights large enough for logits that are not flat.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM, PreTrainedModel

ATOL = RTOL = 1e-4


@dataclass(frozen=True)
class Shape:
    """Architecture and its special settings."""

    name: str
    pattern: str
    seed: int
    fields: dict = field(default_factory=dict)  # of NemotronHConfig, over _SMALL
    tied: bool = False
    skip_connection: bool = True  # False: D is zero


_SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "chunk_size": 16,
    "max_position_embeddings": 512,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}

SHAPES = (
    Shape("mha", "M*M-", seed=1),
    Shape(
        "gqa, groups, wide heads, tied",
        "M-M*M-*",
        seed=2,
        tied=True,
        fields={
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 3,
            "ssm_state_size": 8,
            "chunk_size": 32,
        },
    ),
    Shape(
        "mqa, other window, epsilon and chunk, no D",
        "*M-MM",
        seed=3,
        skip_connection=False,
        fields={
            "num_key_value_heads": 1,
            "head_dim": 16,
            "mamba_num_heads": 8,
            "n_groups": 4,
            "ssm_state_size": 24,
            "conv_kernel": 3,
            "layer_norm_epsilon": 1e-2,
            "chunk_size": 100,
            "time_step_min": 0.02,  # above many of the steps: transformers would clamp them, see `unclamp`
        },
    ),
    Shape("no attention", "M-MM", seed=4, fields={"mamba_num_heads": 2, "n_groups": 2, "mamba_head_dim": 24}),
    Shape("attention only", "*-*-", seed=5, fields={"num_key_value_heads": 2}),
    Shape("MoE", "ME*E-", seed=66, fields={"routed_scaling_factor": 2.5}),
    Shape(
        "MoE, groups",
        "EM*ME",
        seed=127,
        fields={
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    Shape(
        "MoE, latent, one expert a token",
        "ME*E",
        seed=108,
        fields={"moe_latent_size": 12, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
)


def make(shape: Shape, directory: Path) -> NemotronHForCausalLM:
    """A model of a shape, saved to a directory by transformers itself."""
    torch.manual_seed(shape.seed)
    config = NemotronHConfig(**(_SMALL | shape.fields), hybrid_override_pattern=shape.pattern)
    model = NemotronHForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_value(name, parameter, shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)  # as large as the scores differ
        if shape.tied:  # transformers itself keeps two matrices whatever `tie_word_embeddings` says
            config.tie_word_embeddings = True
            model.lm_head.weight.copy_(model.model.embeddings.weight)
    model.save_pretrained(directory)
    unclamp(model)
    return model


def _value(name: str, parameter: Tensor, shape: Shape) -> Tensor:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind == "A_log":
        return torch.empty_like(parameter).uniform_(0.01, 0.1).log()
    if kind == "dt_bias":
        return torch.empty_like(parameter).uniform_(0.01, 0.05).expm1().log()
    if kind == "D":
        return torch.randn_like(parameter) * shape.skip_connection
    if kind in ("norm", "norm_f"):
        return 1 + 0.2 * torch.randn_like(parameter)
    if name.endswith("conv1d.bias"):
        return 0.3 * torch.randn_like(parameter)
    if kind == "embeddings":
        return torch.randn_like(parameter)
    gain = {"conv1d": 1.0, "q_proj": 1.5, "k_proj": 1.5, "lm_head": 1.0}.get(kind, 1.2)
    inputs = parameter.shape[-1] if "experts" in name else parameter[0].numel()
    value = torch.randn_like(parameter) * gain / math.sqrt(inputs)
    if kind == "in_proj":
        heads = (_SMALL | shape.fields)["mamba_num_heads"]
        value[-heads:] *= 0.3  # the input changes a step by a factor, not by its order
    return value


def moe_layers(model: nn.Module) -> list[nn.Module]:
    """Transformers' MoE blocks."""
    return [layer.mixer for layer in model.model.layers if hasattr(layer.mixer, "experts")]


@torch.no_grad()
def routing_margin(model: NemotronHForCausalLM, tokens: list[int]) -> float:
    """Smallest margin, over all tokens, by which a router of the model prefers its choice.

    For groups: the smallest difference between a chosen and an unchosen sum. For experts: the smallest difference
    between chosen and unchosen scores plus biases, within the chosen groups.
    """
    inputs: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        layer.gate.register_forward_pre_hook(lambda gate, args: inputs.append((gate, args[0][0])))
        for layer in moe_layers(model)
    ]
    their_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return min((_margin(gate, hidden) for gate, hidden in inputs), default=math.inf)


def _margin(gate: nn.Module, hidden: Tensor) -> float:
    """Margin of one router for its inputs [T, h]."""
    scores = (hidden @ gate.weight.T).sigmoid() + gate.e_score_correction_bias  # [T, experts]
    grouped = scores.unflatten(-1, (gate.num_group, -1))
    group_scores = grouped.topk(2).values.sum(-1)  # [T, groups]
    margins = []
    if gate.topk_group < gate.num_group:
        margins.append(_gap(group_scores, gate.topk_group))
        closed = group_scores < group_scores.topk(gate.topk_group).values[:, -1:]
        scores = grouped.masked_fill(closed[..., None], -math.inf).flatten(-2)
    return min([*margins, _gap(scores, gate.top_k)])


def _gap(scores: Tensor, chosen: int) -> float:
    ranked = scores.sort(descending=True).values
    return (ranked[:, chosen - 1] - ranked[:, chosen]).min().item()


def unclamp(model: nn.Module) -> None:
    """Undo a clamp of dt that transformers has in its chunk path only; the published models were trained without."""
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, math.inf)


def prompt(length: int, *, seed: int, vocab_size: int = _SMALL["vocab_size"]) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[T, V] of a full forward."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def our_logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """[T, V] of a full forward without any engine."""
    return model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)[0]


def their_greedy(model: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers' own `generate`; it cannot cache for a model without attention."""
    model.generation_config.eos_token_id = None
    has_attention = "full_attention" in getattr(model.config, "layers_block_type", ["full_attention"])
    inputs = torch.tensor([tokens])
    generated = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),  # without it the padding token would be hidden wherever it stands
        max_new_tokens=count,
        do_sample=False,
        use_cache=has_attention,
        pad_token_id=0,
    )
    return generated[0, len(tokens) :].tolist()


def largest_excess(got: Tensor, reference: Tensor) -> float:
    """Largest error of an element in units of its tolerance: at most 1 is equal."""
    return ((got - reference).abs() / (ATOL + RTOL * reference.abs())).max().item()


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields of a saved `config.json`; None takes a field out."""
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def edit_weights(directory: Path, change) -> None:
    """Rewrite `model.safetensors`; `change` modifies the dictionary of tensors in place."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
