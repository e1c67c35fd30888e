"""Memory and messages of each rank, by formula: the tables of docs/scale.md.

Nothing is measured. tests/unit_tests/parallel/test_scale.py compares the formulas with models that are built and steps
that are counted, and the document with this file.

Letters: T tokens of a step, m of them sampled from, h channels, V vocabulary, t tensor-parallel ranks, b bytes a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.cases import Run, case
from megatron_ext.config import ModelConfig, ParallelConfig
from megatron_ext.mcore.layers.layer_map import kv_heads_of_rank
from megatron_ext.models.size import matrix_parameter_count
from megatron_ext.parallel.layout import Share, share_of

KIB, MIB, GIB = 1024, 1024**2, 1024**3
STATE_BYTES = 4  # of a value of a recurrent state: fp32 unless asked for otherwise
TOKEN_BYTES = 8


def _hybrid(runs: tuple[int, ...], **sizes: object) -> ModelConfig:
    """Hybrid of runs of Mamba-2 layers with an MLP each; all runs but the last have attention before their last MLP."""
    pattern = "-".join("-".join("M" * run) + "*" for run in runs[:-1]) + "-" + "M-" * runs[-1]
    common = {"kv_channels": 128, "num_query_groups": 8, "mamba_head_dim": 64, "mamba_num_groups": 8}
    return ModelConfig(
        hybrid_override_pattern=pattern,
        squared_relu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        vocab_size=131_072,
        **common,
        **sizes,
    )


# Sizes as NemotronH has them: 24 and 54 Mamba-2 layers, 24 and 54 MLPs, 4 and 10 attention layers.
MODELS = {
    "8B": _hybrid(
        (4, 5, 5, 5, 5),
        hidden_size=4096,
        ffn_hidden_size=21_504,
        num_attention_heads=32,
        mamba_num_heads=128,
        mamba_state_dim=128,
    ),
    "56B": _hybrid(
        (4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5),
        hidden_size=8192,
        ffn_hidden_size=32_768,
        num_attention_heads=64,
        mamba_num_heads=256,
        mamba_state_dim=256,
    ),
}
TP_8 = ParallelConfig(tensor_model_parallel_size=8)
LAYOUTS = {
    "one rank": ParallelConfig(),
    "TP 8": TP_8,
    "PP 4": ParallelConfig(pipeline_model_parallel_size=4),
    "TP 8 x PP 4": ParallelConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=4),
}
BLOCK = 64
PROMPT, SKIPPED = 32 * KIB, 31 * KIB
STEPS = {"decode of 64": 64, "prefill of 16,384": 16_384}


# What a rank holds


def shares(config: ModelConfig, parallel: ParallelConfig) -> list[Share]:
    """Shares of one rank of each pipeline stage."""
    return [share_of(parallel, config, stage) for stage in range(parallel.pipeline_model_parallel_size)]


def kv_bytes_per_token(config: ModelConfig, share: Share, b: int) -> int:
    """2 (keys and values) x attention layers of the stage x max(1, groups / t) x channels of a head x b."""
    heads = kv_heads_of_rank(config.query_groups, share.parallel.tensor_model_parallel_size)
    return 2 * share.pattern(config).count("*") * heads * config.head_channels * b


def state_bytes(config: ModelConfig, share: Share, b: int) -> int:
    """State bytes of one sequence: Mamba-2 layers of the stage x ((inner + 2 G N) (K - 1) b + H P N x 4 bytes) / t."""
    inner = config.mamba_heads * config.mamba_head_dim
    channels = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
    values = inner * config.mamba_state_dim
    layer = channels * (config.mamba_conv_kernel - 1) * b + values * STATE_BYTES
    return share.pattern(config).count("M") * layer // share.parallel.tensor_model_parallel_size


# What ranks send


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind that a rank makes in a step.

    Attributes:
        count: Number of messages.
        each: Bytes that it puts into each, on average.
    """

    count: int
    each: float

    @property
    def total(self) -> int:
        """Bytes of all."""
        return round(self.count * self.each)


def all_reduces(config: ModelConfig, share: Share, T: int, b: int) -> Traffic:
    """[T, h] once for the embedding and once a layer; Mamba-1 one more, of its dt, B and C; shared experts one more."""
    if share.parallel.tensor_model_parallel_size == 1:
        return Traffic(0, 0)
    pattern, h = share.pattern(config), config.hidden_size
    sizes = [h] * (share.is_first + sum(pattern.count(letter) for letter in "M*-"))
    if config.recurrent_layer == "mamba1":
        sizes += [config.dt_rank + 2 * config.mamba_state_dim] * pattern.count("M")
    if config.is_moe:
        sizes += [config.moe_latent_size or h] * pattern.count("E")
        sizes += [h] * pattern.count("E") * bool(config.moe_shared_expert_intermediate_size)
    return Traffic(len(sizes), T * b * sum(sizes) / max(1, len(sizes)))


def logits_gather(config: ModelConfig, share: Share, m: int, b: int) -> Traffic:
    """[m, V / t] from each tensor-parallel rank of the last stage to the others."""
    t = share.parallel.tensor_model_parallel_size
    if t == 1 or not share.is_last or m == 0:
        return Traffic(0, 0)
    assert config.vocab_size is not None, "these models have one"
    return Traffic(1, m * config.vocab_size / t * b)


def stage_sends(config: ModelConfig, share: Share, T: int, b: int) -> Traffic:
    """[T, h] to the next stage, from each tensor-parallel rank to its own peer."""
    return Traffic(0, 0) if share.is_last else Traffic(1, T * config.hidden_size * b)


def expert_sends(config: ModelConfig, share: Share, T: int, b: int) -> Traffic:
    """All-to-alls of a MoE layer: out and back, and the weights (fp32) out; of this rank's share of its tokens.

    A rank sends its share's k choices of a token to their experts; 1 / E of them stay, in the mean.
    """
    layers, ranks = share.pattern(config).count("E"), share.parallel.expert_model_parallel_size
    if ranks == 1 or not layers:
        return Traffic(0, 0)
    divided = share.parallel.tensor_model_parallel_size // share.parallel.expert_tensor_size
    rows = T // divided * config.moe_router_topk
    width = config.moe_latent_size or config.hidden_size
    return Traffic(3 * layers, rows * (2 * width * b + 4) / 3)


# Tokens of a prompt after the skipped ones


def prefill_flops(config: ModelConfig, length: int, skipped: int) -> float:
    """2 x matrices x computed tokens + scan + causal attention; the output layer for one token."""
    assert config.vocab_size is not None, "these models have one"
    vocabulary = config.vocab_size * config.hidden_size
    whole = Share(ParallelConfig(), (share_of(ParallelConfig(), config, 0).stage,), 0)
    matrices = matrix_parameter_count(config, whole) - 2 * vocabulary
    pattern = config.hybrid_override_pattern
    scan = pattern.count("M") * 4 * config.mamba_heads * config.mamba_head_dim * config.mamba_state_dim
    pairs = (length * (length + 1) - skipped * (skipped + 1)) / 2
    attention = pattern.count("*") * 4 * config.num_attention_heads * config.head_channels * pairs
    return (length - skipped) * (2 * matrices + scan) + attention + 2 * vocabulary


# Tables


@case("simulation")
def scale(run: Run) -> None:
    """Memory and messages of ranks of 8B and 56B hybrids, computed by formula: the tables of docs/scale.md."""
    for text in tables().values():
        run.remark(f"\n{text}")


def tables() -> dict[str, str]:
    """All tables of docs/scale.md, by their subject."""
    return {"held": held_table(), "sent": sent_table(), "left": left_table()}


def held_table() -> str:
    """Parameters, keys and values, states: what the rank with most of each holds, in bf16."""
    rows = []
    for model, config in MODELS.items():
        for layout, parallel in LAYOUTS.items():
            own = shares(config, parallel)
            parameters = max(2 * matrix_parameter_count(config, share) for share in own)
            kv = max(kv_bytes_per_token(config, share, 2) for share in own)
            states = max(state_bytes(config, share, 2) for share in own)
            layers = " + ".join(str(len(share.stage)) for share in own)
            rows.append((model, layout, layers, _size(parameters), _size(kv * BLOCK), _size(states)))
    return _markdown(("", "", "layers of the stages", "parameters", f"a block of {BLOCK} tokens", "a state"), rows)


def sent_table() -> str:
    """All-reduces and bytes to the next stage, for the rank that sends most, in a decode and in a prefill."""
    rows = [
        (model, layout, *_sent(config, parallel))
        for model, config in MODELS.items()
        for layout, parallel in list(LAYOUTS.items())[1:]
    ]
    return _markdown(
        ("", "", "all-reduces", *(f"{step}, {name}" for step in STEPS for name in ("reduced", "to the next stage"))),
        rows,
    )


def _sent(config: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    own = shares(config, parallel)
    yield str(max(all_reduces(config, share, 1, 2).count for share in own) or "-")
    for T in STEPS.values():
        yield _size(max(all_reduces(config, share, T, 2).total for share in own))
        yield _size(max(stage_sends(config, share, T, 2).total for share in own))


def left_table() -> str:
    """A prompt of which most is skipped, beside the same one computed whole."""
    rows = []
    for model, config in MODELS.items():
        cold, warm = (prefill_flops(config, PROMPT, skipped) for skipped in (0, SKIPPED))
        (share,) = shares(config, TP_8)
        reduced = [all_reduces(config, share, tokens, 2).total for tokens in (PROMPT, PROMPT - SKIPPED)]
        read = kv_bytes_per_token(config, share, 2) * SKIPPED
        rows.append(
            (
                model,
                *(f"{flops / 1e12:,.1f}" for flops in (cold, warm)),
                f"{cold / warm:.1f}",
                *map(_size, reduced),
                _size(read),
                _size(state_bytes(config, share, 2)),
            )
        )
    head = (
        "",
        "cold, TFLOP",
        "warm, TFLOP",
        "cold / warm",
        "all-reduced, TP 8, cold",
        "warm",
        "cached keys and values, a rank",
        "state, a rank",
    )
    return _markdown(head, rows)


def _size(count: int) -> str:
    """A number of bytes, to three digits."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count} B" if count else "-"


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
