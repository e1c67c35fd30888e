"""FA-3: a family is one record and a line of the registry, even one that the package has never heard of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.models.huggingface import family_registry
from megatron_ext.models.huggingface.attention import ROPE_FIELDS, attention_heads, rotary_fields, rotated_head_size
from megatron_ext.models.huggingface.family import Family
from megatron_ext.models.huggingface.fields import Fields, FieldTable, Values, names
from megatron_ext.models.huggingface.hf_checkpoint import translate
from megatron_ext.models.huggingface.tensors import (
    Conversion,
    Source,
    TensorTable,
    weights,
)
from tests.unit_tests.models.huggingface import oracles as oracle
from tests.unit_tests.models.huggingface.oracles import excess, load_hf
from tests.unit_tests.support.source import ROOT, imported_modules, parse, python_files


def test_only_the_registry_names_families() -> None:
    """FA-3: a new family touches only its record, the registry, and tests."""
    folder = ROOT / "megatron_ext" / "models" / "huggingface"
    naming = {
        str(path.relative_to(folder))
        for path in python_files(ROOT / "megatron_ext")
        if path.parent != folder / "families"
        and "huggingface.families" in path.read_text("utf-8")
        and any(
            module.startswith("megatron_ext.models.huggingface.families") for module in imported_modules(parse(path))
        )
    }
    assert naming == {"family_registry.py"}


# A family of our own: Llama under other names, query, key and value in one matrix, up above gate


def _interleaved(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """All of q, of k, of v -> [q k v] of each head; one key/value head for each query head."""
    return parts[0].unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)


def _gate_first(parts: Sequence[Tensor], _: ModelConfig) -> Tensor:
    return torch.cat(parts[0].chunk(2)[::-1])


ATTENTION = {
    **weights({"input_layernorm": "ln_1", "self_attention.linear_proj": "attn.out"}),
    "self_attention.linear_qkv.weight": Source(
        ("attn.qkv.weight",), Conversion(lambda config: [3 * config.hidden_size], _interleaved)
    ),
}
FEED_FORWARD = {
    **weights({"pre_mlp_layernorm": "ln_2", "mlp.linear_fc2": "ff.down"}),
    "mlp.linear_fc1.weight": Source(
        ("ff.up_gate.weight",), Conversion(lambda config: [2 * config.ffn_size], _gate_first)
    ),
}


def _derived(fields: Fields) -> Values:
    return {**attention_heads(fields), **rotated_head_size(fields), **rotary_fields(fields)}


TOY = Family(
    model_type="toy",
    architecture="ToyForCausalLM",
    fields=FieldTable(
        other_names={"n_embd": "hidden_size"},
        sizes={
            "hidden_size": "hidden_size",
            "ff_size": "ffn_hidden_size",
            "n_positions": "max_position_embeddings",
            "num_attention_heads": "num_attention_heads",
            "vocab_size": "vocab_size",
        },
        numbers={"eps": ("norm_epsilon", 1e-6)},
        fixed={"activation": ("silu",)},
        read=names("num_key_value_heads head_dim") | ROPE_FIELDS,
    ),
    pattern=lambda fields: "*-" * fields.layer_count,
    tensors=TensorTable(
        layers={"*": ATTENTION, "-": FEED_FORWARD},
        embedding="wte.weight",
        final_norm="ln_f.weight",
        prefixes=("transformer.",),
        ignored=r"mask",
    ),
    constants={"swiglu": True},
    derived=(_derived,),
)
OTHER_FIELDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "ff_size",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "eps",
    "hidden_act": "activation",
}
OTHER_TENSORS = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.layers.",
    "self_attn.o_proj.": "attn.out.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "mlp.down_proj": "ff.down",
}


def _as_toy(tensors: dict[str, Tensor]) -> None:
    for layer in range(2):
        part = f"model.layers.{layer}"
        projections = [tensors.pop(f"{part}.self_attn.{one}_proj.weight") for one in "qkv"]
        tensors[f"{part}.attn.qkv.weight"] = torch.cat(projections)
        tensors[f"{part}.ff.up_gate.weight"] = torch.cat(
            [tensors.pop(f"{part}.mlp.{one}_proj.weight") for one in ("up", "gate")]
        )
    for name in list(tensors):
        renamed = name
        for theirs, toys in OTHER_TENSORS.items():
            renamed = renamed.replace(theirs, toys)
        tensors[renamed] = tensors.pop(name)
    tensors["transformer.mask"] = torch.ones(4, 4)


@pytest.fixture
def toy(llama_copy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of the toy family, which the registry has for the time of the test."""
    monkeypatch.setitem(family_registry.FAMILIES, TOY.model_type, TOY)
    raw = json.loads((llama_copy / "config.json").read_text())
    raw = {OTHER_FIELDS.get(name, name): value for name, value in raw.items()}
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        raw.pop(name)
    raw |= {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
    (llama_copy / "config.json").write_text(json.dumps(raw))
    oracle.edit_weights(llama_copy, _as_toy)
    return llama_copy


def test_a_new_family_is_one_record(toy: Path, oracles) -> None:
    """A record and a place in the registry suffice: shared machinery reads fields, names and conversions."""
    assert excess(load_hf(toy).model, oracles("llama")[0]) <= 1


def test_the_comparison_sees_a_missing_conversion(toy: Path, oracles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each tensor of the two that are converted, taken as it is."""
    for letter, name in (("*", "self_attention.linear_qkv.weight"), ("-", "mlp.linear_fc1.weight")):
        plain = dataclasses.replace(TOY.tensors.layers[letter][name], conversion=None)
        layers = {**TOY.tensors.layers, letter: {**TOY.tensors.layers[letter], name: plain}}
        spoiled = dataclasses.replace(TOY, tensors=dataclasses.replace(TOY.tensors, layers=layers))
        monkeypatch.setitem(family_registry.FAMILIES, "toy", spoiled)
        assert excess(load_hf(toy).model, oracles("llama")[0]) > 100, name


SPOILED = {
    r"qkv.weight has shape \(95, 32\), and the configuration requires \(96, 32\)": {
        "transformer.layers.1.attn.qkv.weight": torch.ones(95, 32)
    },
    r"up_gate.weight has shape \(80, 31\), and the configuration requires \(80, 32\)": {
        "transformer.layers.0.ff.up_gate.weight": torch.ones(80, 31)
    },
    "has unexpected layers.0.attn.bias": {"transformer.layers.0.attn.bias": torch.ones(32)},
    "ln_f.weight is of type int32": {"transformer.ln_f.weight": torch.ones(32).int()},
}


@pytest.mark.parametrize("message", SPOILED)
def test_tensors_of_a_new_family_are_named(message: str, toy: Path) -> None:
    oracle.edit_weights(toy, lambda tensors: tensors.update(SPOILED[message]))
    with pytest.raises(CheckpointError, match=message):
        load_hf(toy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "gelu"}, "activation = 'gelu' is not supported; supported is 'silu'"),
        ({"hidden_size": 7}, "hidden_size 7 contradicts hidden_size 32"),
        ({"eps": 0}, "eps = 0 is not supported"),
        ({"ff_size": None}, "ff_size = None is not supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "supported is 'ToyForCausalLM' of model_type 'toy'"),
    ],
    ids=str,
)
def test_fields_of_a_new_family_are_named(changes: dict, message: str, toy: Path) -> None:
    raw = json.loads((toy / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        translate(raw | changes)
