"""A stream beside a long prompt: time to first token of the prompt, and rate and gaps of the stream (SC-4)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

from benchmarks.cases import Run, case
from benchmarks.measuring import own_time, timed
from benchmarks.models import Engine, engine, prompts, random_model, shaped
from benchmarks.peers.sizes import SIZES
from megatron_ext.config import RequestParams, batching
from megatron_ext.engine import core
from megatron_ext.models.load import LoadedModel

BLOCK, OWN_STEPS, WARM_UP = 64, 16, 4  # OWN_STEPS: of the stream alone, before each prompt
ALONE, ONE_BLOCK, DEFAULT = "alone", "a block a step", "default"


@case("serving", quick={"prompt": 300, "rounds": 1, "shares": (0.5,)})
def decode_share(
    run: Run,
    size: str = "5m",
    prompt: int = 8_000,
    rounds: int = 3,
    shares: tuple = (0.0, 0.25, 0.5, 0.75),
    bound: int = batching.PREFILL_TOKENS_BESIDE_DECODES["cpu"],
) -> None:
    """Prompt beside a stream, for each `--decode-share`, over the same prompt alone; settings take turns.

    With one thread times are CPU times, which other processes hardly disturb.
    """
    shape = SIZES[size].shape
    loaded = random_model(shaped(shape))
    engines = {ALONE: _built(loaded, None, bound), ONE_BLOCK: _built(loaded, None, BLOCK)}
    engines |= {
        DEFAULT: _built(loaded, None, bound),
        **{f"{share:g}": _built(loaded, share, bound) for share in shares},
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for number in range(rounds):
        for name, built in engines.items():
            tokens = prompts(1, prompt, f"{name} {number}", shape.vocabulary)[0]
            with mock.patch.object(core, "time", SimpleNamespace(perf_counter=own_time)):
                found[name].append(_beside(built, tokens, has_stream=name != ALONE))
    alone, largest = (statistics.median(one[i] for one in found[name]) for name, i in ((ALONE, 0), (ONE_BLOCK, 1)))
    for name, seen in found.items():
        seconds, gap, rate = (statistics.median(values) for values in zip(*seen, strict=True))
        figures = {"first token, s": seconds, "/ alone": seconds / alone}
        beside = {"largest gap, ms": 1e3 * gap, "/ a block a step": gap / largest, "share of own rate": rate}
        run.row(name, figures | (beside if name != ALONE else {}))


def _built(loaded: LoadedModel, share: float | None, bound: int) -> Engine:
    with mock.patch.dict(batching.PREFILL_TOKENS_BESIDE_DECODES, cpu=bound):
        return engine(loaded, block_size=BLOCK, block_count=400, max_requests=4, decode_share=share, is_served=True)


def _beside(built: Engine, prompt: Sequence[int], *, has_stream: bool) -> tuple[float, float, float]:
    """Return seconds to the prompt's first token, the stream's largest gap, and its rate over that before."""
    own, stream = 0.0, None
    if has_stream:
        (stream,) = built.start_decoding([prompt[:BLOCK]], RequestParams(10_000 - len(prompt) // 2, ignore_eos=True))
        own = statistics.median([timed(built.step, own_time) for _ in range(WARM_UP + OWN_STEPS)][WARM_UP:])
    asked, steps = built.add(prompt, RequestParams(1, ignore_eos=True)), list[float]()
    while not asked.is_ended:
        steps.append(timed(built.step, own_time))
    if stream is not None:
        built.core.output.abort(stream)
        built.drain()
    return sum(steps), max(steps), own * len(steps) / sum(steps)
