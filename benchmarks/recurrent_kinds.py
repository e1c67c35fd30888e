"""Cold speed of each kind of recurrent layer beside transformers with the same weights, in one run.

Run: `python -m benchmarks.recurrent_kinds` (`--prefill`: that, too). Hidden size 256 everywhere: a NemotronH (Mamba-2),
a Mamba (Mamba-1 alone), a Jamba (Mamba-1 with attention) and a Qwen3-Next (gated delta net with attention), of eight
layers and no experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from benchmarks.base_speed import DECODE_REQUESTS, DECODE_TOKENS, median_decode_seconds, prompts, reference_prefill
from benchmarks.measuring import header, keep_figures, part_arguments, seconds
from benchmarks.nemotron_shaped import VOCABULARY, Pair, build_pair, pair_of
from megatron_ext.config import RequestParams
from megatron_ext.mcore import platform

PREFILLS = ((1, 2048), (8, 512))


def mamba() -> PreTrainedModel:
    """Random weights: eight layers of Mamba-1 and nothing else."""
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        state_size=16,
        num_hidden_layers=8,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MambaForCausalLM(config)


def jamba() -> PreTrainedModel:
    """Random weights: two attention layers among eight, an MLP after each."""
    config = JambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_layer_period=4,
        attn_layer_offset=3,
        num_experts=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
        max_position_embeddings=16_384,
        eos_token_id=None,
        pad_token_id=0,
    )
    return JambaForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Random weights: two attention layers among eight, an MLP after each."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        mlp_only_layers=list(range(8)),
        max_position_embeddings=16_384,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3NextForCausalLM(config)


def main() -> None:
    """Measure and print."""
    parser = part_arguments(__doc__)
    parser.add_argument("--prefill", action="store_true", help="measure prefill, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = platform.device()
    builders: dict[str, Callable[[], Pair]] = {
        "Mamba-2 (NemotronH)": lambda: build_pair(device, torch.float32),
        "Mamba-1 (Mamba)": lambda: pair_of(mamba(), device, torch.float32),
        "Mamba-1 (Jamba)": lambda: pair_of(jamba(), device, torch.float32),
        "gated delta net (Qwen3-Next)": lambda: pair_of(qwen3_next(), device, torch.float32),
    }
    console = Console(highlight=False)
    console.print(header(device, torch.float32), markup=False)
    table = Table("kind", "work", "ours, tokens/s", "transformers, tokens/s", "ours / transformers")
    found: dict[str, dict[str, float]] = {}
    for name, build in list(builders.items())[: 1 if options.quick else None]:
        torch.manual_seed(0)
        pair = build()
        check_equal(pair)
        found[name] = {}
        for work, total, ours, theirs in [*(prefill(pair) if options.prefill else ()), decode(pair)]:
            found[name][work] = theirs / ours
            table.add_row(name, work, f"{total / ours:.0f}", f"{total / theirs:.0f}", f"{theirs / ours:.2f}")
        console.print(f"  {name}: {found[name]}", markup=False)
    console.print(table)
    keep_figures(options, found)
    platform.shut_down()


@torch.inference_mode()
def check_equal(pair: Pair) -> None:
    """Figures of different answers would mean nothing."""
    device = platform.device()
    tokens = prompts(1, 200).to(device)
    ours = pair.ours.model(tokens, torch.arange(200, device=device)[None], None)
    worst = (pair.reference(tokens).logits - ours).abs().max().item()
    if worst > 1e-3:
        raise RuntimeError(f"the two models differ by {worst} in their logits: nothing to compare")


Row = tuple[str, int, float, float]  # work, its tokens, our seconds, transformers' seconds


def prefill(pair: Pair) -> list[Row]:
    """Measure prefills of one long prompt and of several."""
    found = []
    for count, length in PREFILLS:
        tokens = prompts(count, length)
        engine = pair.engine(max_tokens=count * length)
        ours = seconds(lambda engine=engine, tokens=tokens: engine.generate(tokens.tolist(), RequestParams(1)))
        theirs = seconds(lambda tokens=tokens: reference_prefill(pair, tokens))
        found.append((f"prefill {count} x {length}", count * length, ours, theirs))
    return found


def decode(pair: Pair) -> Row:
    """Measure decoding of eight requests at once."""
    ours, theirs = median_decode_seconds(pair)
    return "decode", DECODE_REQUESTS * DECODE_TOKENS, ours, theirs


if __name__ == "__main__":
    main()
