"""What a GPU does with it, in one script of under ten minutes (CU-8): whether it is right, then how fast it is.

Run: `python -m benchmarks.gpu` on a machine with a CUDA device (`--quick`: small models and few tokens, on a CPU too,
so that the script itself is tried). For a hybrid of 2 billion parameters of each recurrent kind, random weights, bf16:

- parity: log-probs of the operators chosen for the device beside those of the reference, in fp32, a small model;
- no synchronisation: steps of decode are launched with `torch.cuda.set_sync_debug_mode("error")`;
- graphs: tokens of replayed graphs equal those of eager steps;
- times to the first token, cold and behind a cached prefix of 8k and 32k tokens, one and eight requests at once;
- decode tokens a second of 1, 8 and 64 requests, eager and by graphs, and the share of it in which the device idles.

Exit code 1 if something is not right; speed is only told.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import header, keep_figures, part_arguments, seconds, synchronize
from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.mcore.buckets import Bucket
from megatron_ext.mcore.fixed_steps import FixedSteps, Launched
from megatron_ext.models.build import build_model
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.text.tokenizer import NullTokenizer

VOCABULARY, BLOCK, OWN = 32_000, 64, 64
LARGE = ModelConfig(
    hybrid_override_pattern="M-M-M-M*-" * 5,
    hidden_size=2560,
    ffn_hidden_size=10_240,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    mamba_state_dim=128,
    mamba_head_dim=64,
    mamba_num_heads=80,
    mamba_num_groups=8,
    squared_relu=True,
    vocab_size=VOCABULARY,
    max_position_embeddings=65_536,
)
SMALL = dataclasses.replace(
    LARGE,
    hybrid_override_pattern="M-M*-",
    hidden_size=128,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=32,
    mamba_state_dim=32,
    mamba_head_dim=32,
    mamba_num_heads=8,
    mamba_num_groups=2,
    vocab_size=512,
    max_position_embeddings=4096,
)
DELTA_HEADS = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
SMALL_DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
KINDS = ("mamba2", "mamba1", "gated_delta_net")
PARITY = 2e-3  # of log-probs in fp32, whose products may be rounded to tf32
DECODES, STEPS = (1, 8, 64), 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    model: ModelConfig
    dtype: torch.dtype
    prefixes: Sequence[int]
    decodes: Sequence[int]
    steps: int


def main() -> int:
    """Measure and print.

    Returns:
        The exit code.
    """
    parser = part_arguments(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = platform.device()
    if device.type != "cuda" and not options.quick:
        print("benchmarks.gpu: no CUDA device is here; --quick tries the script itself", file=sys.stderr)
        return 2
    sizes = Sizes(LARGE, torch.bfloat16, (8192, 32_768), DECODES, STEPS)
    if options.quick:
        sizes = Sizes(SMALL, torch.float32, (256, 512), (1, 2), 8)
    console = Console(highlight=False, width=140)
    console.print(header(device, sizes.dtype))
    checks = {kind: right(kind, device) for kind in options.kinds}
    console.print(table_of(checks, "is it right"))
    speeds = {kind: speed(model_config(kind, sizes.model), sizes, device) for kind in options.kinds}
    console.print(table_of(speeds, "how fast"))
    keep_figures(options, {"right": checks, "speed": speeds})
    platform.shut_down()
    return 0 if all(found["ok"] for found in checks.values()) else 1


def model_config(kind: str, like: ModelConfig) -> ModelConfig:
    """The same with recurrent layers of a kind."""
    heads = SMALL_DELTA_HEADS if like is SMALL else DELTA_HEADS
    fields = heads if kind == "gated_delta_net" else {}
    return dataclasses.replace(like, recurrent_layer=kind, **fields)


def table_of(found: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """Rows are what was found, columns are kinds."""
    table = Table(title, *found)
    for name in next(iter(found.values())):
        table.add_row(name, *(f"{values[name]:.4g}" for values in found.values()))
    return table


# Whether it is right


def right(kind: str, device: torch.device) -> dict[str, float]:
    """A small model in fp32: the device's operators beside the reference's, graphs beside eager steps."""
    config = model_config(kind, SMALL)
    model = build_model(config, device=device, seed=3)
    prompts = [_prompt(length, config, seed=length) for length in (200, 65, 64, 7)]
    wish = RequestParams(num_tokens_to_generate=24, ignore_eos=True, return_log_probs=True, skip_prompt_log_probs=True)
    plain = dataclasses.replace(wish, return_log_probs=False)
    reference = _served(model, config, prompts, wish, operator_backend="reference")
    ours = _served(model, config, prompts, wish)
    eager = _served(model, config, prompts, plain)
    graphs = _served(model, config, prompts, plain, cuda_graph_impl="local")
    difference = max(_difference(one, other) for one, other in zip(ours, reference, strict=True))
    same = all(one.generated_tokens == other.generated_tokens for one, other in zip(eager, graphs, strict=True))
    can_tell = torch.cuda.is_available()  # a CPU is waited for in any case
    silent = _launches_without_waiting(model, config, prompts, plain) if can_tell else float("nan")
    return {
        "log-probs differ by": difference,
        "graphs give the same tokens": same,
        "no step of decode waits": silent,
        "ok": difference <= PARITY and same and bool(silent),
    }


def _difference(one: RequestRecord, other: RequestRecord) -> float:
    """Of log-probs, up to the first tokens that differ, which must be as likely: random weights have near ties."""
    found = 0.0
    pairs = zip(one.generated_tokens, other.generated_tokens, one.generated_log_probs, other.generated_log_probs)  # type: ignore[arg-type]  # noqa: B905 - asked for; ties end it
    for token, like, log_prob, value in pairs:
        found = max(found, abs(log_prob - value))
        if token != like:
            break
    return found


def _launches_without_waiting(
    model: torch.nn.Module, config: ModelConfig, prompts: Sequence[list[int]], wish: RequestParams
) -> bool:
    """Whether steps of decode are launched by graphs without anything that waits for the device."""
    engine = _engine(model, config, cuda_graph_impl="local")
    for number, prompt in enumerate(prompts):
        engine.add_request(number, prompt, wish)
    while any(not engine.get_request(number).is_decoding for number in range(len(prompts))):
        engine.step_modern()
    try:
        with _waiting_is_an_error():
            for _ in range(4):
                engine.step_modern()
    except RuntimeError as error:
        print(f"a step of decode waits for the device: {error}", file=sys.stderr)
        return False
    finally:
        engine.suspend()
    return True


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """While a step is launched; its tokens are waited for behind that."""
    launch = FixedSteps.launch

    def watched(steps: FixedSteps, step: ScheduledStep, bucket: Bucket) -> Launched:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(steps, step, bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if not torch.cuda.is_available():
        yield
        return
    with mock.patch.object(FixedSteps, "launch", watched):
        yield


# How fast it is


def speed(config: ModelConfig, sizes: Sizes, device: torch.device) -> dict[str, float]:
    """Of one kind."""
    model = build_model(config, dtype=sizes.dtype, device=device, seed=3)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    found = {"billions of parameters": billions}
    for prefix in sizes.prefixes:
        for count in (1, 8):
            found |= first_tokens(model, config, sizes, prefix, count)
    for count in sizes.decodes:
        for graphs in ("none", "local"):
            found |= decode(model, config, sizes, count, graphs)
    del model
    gc.collect()
    return found


def first_tokens(
    model: torch.nn.Module, config: ModelConfig, sizes: Sizes, prefix: int, count: int
) -> dict[str, float]:
    """Milliseconds to the first token of the last of so many requests at once; cold ones share nothing."""
    engine = _engine(model, config, sizes, requests=count, length=prefix + OWN)
    wish = RequestParams(num_tokens_to_generate=1, ignore_eos=True)
    shared, name = _prompt(prefix, config, seed=prefix), f"{prefix} tokens, {count} at once"

    def served(prompts: Sequence[list[int]]) -> float:
        synchronize()
        start = time.perf_counter()
        engine.generate(prompts, wish)
        return 1e3 * (time.perf_counter() - start)

    def together(seed: int) -> list[list[int]]:
        return [shared + _prompt(OWN, config, seed=1000 * seed + i) for i in range(count)]

    cold_prompts = [[_prompt(prefix + OWN, config, seed=-1 - i - 100 * r) for i in range(count)] for r in range(2)]
    served(cold_prompts[0])  # compiles what is compiled at first use
    cold = served(cold_prompts[1])
    for seed in range(3):
        served(together(seed)[:1])
    warm = min(served(together(seed)) for seed in (3, 4))
    engine.suspend()
    return {f"{name}, cold ms": cold, f"{name}, warm ms": warm, f"{name}, cold over warm": cold / warm}


def decode(model: torch.nn.Module, config: ModelConfig, sizes: Sizes, count: int, graphs: str) -> dict[str, float]:
    """Tokens a second of so many requests that decode, and the share of it in which the device has nothing to do."""
    context = sizes.prefixes[0] // 8
    engine = _engine(model, config, sizes, requests=count, length=context + 4 * sizes.steps, cuda_graph_impl=graphs)
    wish = RequestParams(num_tokens_to_generate=4 * sizes.steps, ignore_eos=True)
    for number in range(count):
        engine.add_request(number, _prompt(context, config, seed=number), wish)
    while any(not engine.get_request(number).is_decoding for number in range(count)):
        engine.step_modern()

    def steps() -> None:
        for _ in range(sizes.steps // 2):
            engine.step_modern()

    taken = seconds(steps, repeats=3)
    idle = _idle_share(steps) if torch.cuda.is_available() else float("nan")
    engine.suspend()
    name = f"{count} decode, {'graphs' if graphs == 'local' else 'eager'}"
    return {f"{name}, tokens/s": count * (sizes.steps // 2) / taken, f"{name}, device idle": idle}


def _idle_share(work: Callable[[], None]) -> float:
    """1 - the time that kernels run, of the time that passes; kernels of one stream do not overlap."""
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        work()
        synchronize()
        passed = time.perf_counter() - start
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    return max(0.0, 1 - busy / passed)


def _engine(
    model: torch.nn.Module,
    config: ModelConfig,
    sizes: Sizes | None = None,
    requests: int = 8,
    length: int = 512,
    **batching: object,
) -> InferenceEngine:
    blocks = 3 * requests * (length // BLOCK + 2)
    settings = BatchingConfig(
        block_size=BLOCK,
        block_count=blocks,
        max_requests=requests,
        max_tokens=max(256, min(16_384, length)),
        **batching,
    )
    dtype = torch.float32 if sizes is None else sizes.dtype
    return build_engine(
        model, config, NullTokenizer(config.vocab_size), settings, CacheConfig(snapshot_slots=8 * requests), dtype=dtype
    )


def _served(
    model: torch.nn.Module, config: ModelConfig, prompts: Sequence[list[int]], wish: RequestParams, **batching: object
) -> list[RequestRecord]:
    engine = _engine(model, config, **batching)
    records = engine.generate(list(prompts), wish)
    engine.suspend()
    return records


def _prompt(length: int, config: ModelConfig, seed: int) -> list[int]:
    assert config.vocab_size is not None
    source = random.Random(seed)
    return [source.randrange(config.vocab_size) for _ in range(length)]


if __name__ == "__main__":
    sys.exit(main())
