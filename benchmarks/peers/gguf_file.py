"""GGUF files for llama.cpp: of a NemotronH checkpoint of transformers, or of a published model; needs gguf."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.sizes import Shape, Size

ARCHITECTURE = "nemotron_h"
NAMES = {  # of tensors that are stored as they are, by kind of layer
    "M": {
        "in_proj.weight": "ssm_in.weight",
        "conv1d.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias",
        "out_proj.weight": "ssm_out.weight",
    },
    "*": {
        "q_proj.weight": "attn_q.weight",
        "k_proj.weight": "attn_k.weight",
        "v_proj.weight": "attn_v.weight",
        "o_proj.weight": "attn_output.weight",
    },
    "-": {"up_proj.weight": "ffn_up.weight", "down_proj.weight": "ffn_down.weight"},
}


def gguf_of(model: Path, size: Size) -> Path:
    """Return the GGUF file of a checkpoint in fp32, which is written into its folder, once.

    A published model's folder has its own GGUF file, whose quantized weights are written as their values in fp32.
    """
    path = model / "f32.gguf"
    if not path.exists():
        if size.published:
            (source,) = model.glob("*.gguf")
            _convert(source, path, "LLAMA_FTYPE_ALL_F32")
        else:
            _write(model, size.shape, path)
    return path


def quantized(path: Path) -> Path:
    """Return a file of the same model in Q8_0, by llama.cpp's own tool; written beside it, once."""
    found = path.with_name("q8_0.gguf")
    if not found.exists():
        _convert(path, found, "LLAMA_FTYPE_MOSTLY_Q8_0")
    return found


def _convert(source: Path, target: Path, ftype: str) -> None:
    """Write a GGUF file's model with weights of another type."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = getattr(llama_cpp, ftype), True
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options)
    if code != 0:
        raise RuntimeError(f"llama_model_quantize of {source} returned {code}")


def _write(model: Path, shape: Shape, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _add_settings(writer, shape, json.loads((model / "config.json").read_text("utf-8")))
    for name, values in _tensors(_stored(model / "model.safetensors"), shape):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: Any, shape: Shape, config: dict[str, Any]) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(len(shape.pattern))
    writer.add_feed_forward_length([shape.mlp if layer == "-" else 0 for layer in shape.pattern])
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv([shape.kv_heads if layer == "*" else 0 for layer in shape.pattern])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])  # which llama.cpp asks for, and does not use
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(shape.mamba_heads * shape.mamba_head_dim)
    writer.add_ssm_state_size(shape.state)
    writer.add_ssm_time_step_rank(shape.mamba_heads)
    writer.add_ssm_group_count(shape.groups)


def _stored(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file in fp32."""
    import numpy

    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: numpy.memmap(path, "<f4", "r", 8 + length + one["data_offsets"][0], tuple(one["shape"]))
        for name, one in header.items()
    }


def _tensors(stored: dict[str, Any], shape: Shape) -> Iterator[tuple[str, Any]]:
    """Yield name and values of each tensor of the file."""
    import numpy

    root = next(name for name in stored if "layers.0." in name).partition("layers.0.")[0]
    ends = {name.removeprefix(root): name for name in stored}
    embedding = next(name for name in ends if name.startswith("embed"))
    norm = next(name for name in ends if name.startswith("norm"))
    yield "token_embd.weight", stored[ends[embedding]]
    yield "output_norm.weight", stored[ends[norm]]
    yield "output.weight", stored["lm_head.weight"]
    for number, layer in enumerate(shape.pattern):
        theirs, block = f"{root}layers.{number}.", f"blk.{number}."
        yield f"{block}attn_norm.weight", stored[f"{theirs}norm.weight"]
        mixer = f"{theirs}mixer."
        for name, new in NAMES[layer].items():
            yield block + new, stored[mixer + name]
        if layer == "M":
            yield f"{block}ssm_conv1d.weight", numpy.squeeze(stored[f"{mixer}conv1d.weight"], 1)
            yield f"{block}ssm_a", -numpy.exp(stored[f"{mixer}A_log"])[:, None]
            yield f"{block}ssm_d", stored[f"{mixer}D"][:, None]
            yield f"{block}ssm_norm.weight", stored[f"{mixer}norm.weight"].reshape(shape.groups, -1)
