"""Cold speed of Mamba-1 layers: prefill and decode beside transformers with the same weights and threads.

Run: `python -m benchmarks.mamba1_speed`. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
from rich.console import Console
from rich.table import Table
from transformers import JambaConfig, JambaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from benchmarks.base_speed import (
    DECODE_REQUESTS,
    DECODE_TOKENS,
    check_equal,
    our_decode_seconds,
    prompts,
    reference_decode_seconds,
    reference_prefill,
)
from benchmarks.measuring import header, seconds
from benchmarks.nemotron_shaped import VOCABULARY, Pair
from megatron_ext.config import RequestParams, SourceConfig
from megatron_ext.mcore import platform
from megatron_ext.models.load import load_model

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype, device = torch.bfloat16 if arguments.bf16 else torch.float32, platform.device()
    console = Console(highlight=False)
    console.print(header(device, dtype), markup=False)
    for name, build in (("Mamba, 8 layers", mamba), ("Jamba, 8 layers, one of them attention", jamba)):
        pair = build_pair(build(), device, dtype)
        check_equal(pair)
        console.print(speed_table(name, pair))
    platform.shut_down()


def mamba() -> PreTrainedModel:
    """Random weights of a fixed seed."""
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(**SHARED, num_hidden_layers=8)).eval()


def jamba() -> PreTrainedModel:
    """The same, with attention and MLPs."""
    torch.manual_seed(0)
    config = JambaConfig(
        **SHARED,
        num_hidden_layers=8,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=1,
        max_position_embeddings=16_384,
    )
    return JambaForCausalLM(config).eval()


def build_pair(reference: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Pair:
    """Saved by transformers and loaded by us."""
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = SourceConfig(load_hf=directory, bf16=dtype is torch.bfloat16)
        ours = load_model(source, {"max_position_embeddings": 16_384}, device=device)
    return Pair(reference.to(device, dtype), ours)


def speed_table(name: str, pair: Pair) -> Table:
    """Prompt tokens a second, first token included; generated tokens a second, prefill not counted."""
    table = Table(name, "ours, tokens/s", "transformers, tokens/s", "ours / transformers")
    for count, length in ((1, 2048), (8, 512)):
        tokens = prompts(count, length)
        engine = pair.engine(max_tokens=count * length)
        ours = seconds(lambda engine=engine, tokens=tokens: engine.generate(tokens.tolist(), RequestParams(1)), 3)
        theirs = seconds(lambda tokens=tokens: reference_prefill(pair, tokens), 3)
        table.add_row(f"prefill {count} x {length}", *_row(count * length, ours, theirs))
    ours = statistics.median(our_decode_seconds(pair) for _ in range(3))
    theirs = statistics.median(reference_decode_seconds(pair) for _ in range(3))
    total = DECODE_REQUESTS * DECODE_TOKENS
    table.add_row(f"decode {DECODE_REQUESTS} x {DECODE_TOKENS}", *_row(total, ours, theirs))
    return table


def _row(tokens: int, ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{tokens / ours:.0f}", f"{tokens / theirs:.0f}", f"{theirs / ours:.2f}"


if __name__ == "__main__":
    main()
