"""Lives of engines on whatever device there is; what they give is plain data, so that two processes can compare it.

A life is what a user could do: requests that overlap and hit, are paused and go on, want log-probs, draws, penalties,
forms, drafts; suspends, new weights, other modes, steps by programs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock

import torch

from megatron_ext.config import BatchingConfig, CacheConfig, ModelConfig, RequestParams, SourceConfig
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.assemble import build_engine
from megatron_ext.models.load import load_model
from megatron_ext.runner.cuda_graphs.async_output import Launched
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.text.tokenizer import NullTokenizer
from tests.unit_tests.support.driver import make_prompt
from tests.unit_tests.support.models import CONFIGS, VOCABULARY, build_slow_decay
from tests.unit_tests.support.multi_token import build_predicting, with_prediction

Life = Callable[[AbstractContextManager[object]], dict[str, object]]
Requests = Iterator[tuple[Sequence[int], dict[str, object]]]
STEM = make_prompt(40)
PREDICTING = "hybrid with prediction"
SCORED = {"return_log_probs": True, "top_n_logprobs": 2}
DRAWN = {"temperature": 0.8, "seed": 7}
SHAPED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {5: 1.5}}


@functools.cache
def model_of(kind: str) -> torch.nn.Module:
    """Build the model of a kind on the device."""
    platform.initialize()
    return build_predicting("hybrid") if kind == PREDICTING else build_slow_decay(config_of(kind))


def config_of(kind: str) -> ModelConfig:
    """Config of a tiny model; "wide" has heads that attention has kernels for, `PREDICTING` a layer that drafts."""
    if kind == PREDICTING:
        return with_prediction("hybrid")
    return replace(CONFIGS["hybrid"], kv_channels=16) if kind == "wide" else CONFIGS[kind]


def engine_of(
    kind: str,
    *,
    speculation: SpeculationConfig = NO_SPECULATION,
    cache: CacheConfig | None = None,
    **batching: object,
) -> InferenceEngine:
    """A small one; plain torch computes its operators unless another backend is named."""
    settings = {"block_size": 16, "block_count": 40, "max_requests": 4, "max_sequence_length": 128, "max_tokens": 64}
    settings |= {"operator_backend": "reference"}
    return build_engine(
        model_of(kind),
        config_of(kind),
        NullTokenizer(VOCABULARY),
        BatchingConfig(**(settings | batching)),
        cache or CacheConfig(snapshot_slots=6),
        dtype=torch.float32,
        speculation=speculation,
    )


def plain_requests() -> Requests:
    """Requests with features that every captured step computes."""
    yield [*STEM, *make_prompt(7, 1)], {"num_tokens_to_generate": 9}
    yield make_prompt(17), {"num_tokens_to_generate": 5}
    yield [*STEM, *make_prompt(7, 1), 3], {"num_tokens_to_generate": 6}
    yield [*STEM, *make_prompt(11, 2)], {"num_tokens_to_generate": 8, **DRAWN, "top_k": 9, "top_p": 0.9}
    yield [*STEM, *make_prompt(11, 2), 5, 6], {"num_tokens_to_generate": 7}


def requests() -> Requests:
    """Requests with features of a step beyond greedy tokens."""
    yield [*STEM, *make_prompt(7, 1)], {"num_tokens_to_generate": 9, **SCORED}
    yield make_prompt(17), {"num_tokens_to_generate": 6, **DRAWN, "top_k": 9, "min_p": 0.01, "return_log_probs": True}
    yield [*STEM, *make_prompt(7, 1), 3], {"num_tokens_to_generate": 6, "min_tokens": 4}
    yield [*STEM, *make_prompt(11, 2)], {"num_tokens_to_generate": 8, **DRAWN, "top_p": 0.9}
    yield [*STEM, *make_prompt(11, 2), 5, 6], {"num_tokens_to_generate": 7, **SHAPED, **DRAWN}
    yield [*STEM, 3], {"num_tokens_to_generate": 5, **SHAPED, **SCORED, "skip_prompt_log_probs": True}


def wished() -> Requests:
    """Requests as above with short prompts and without prompt log-probs, so that captured steps accept them."""
    for prompt, wish in requests():
        yield prompt[-30:], wish | ({"skip_prompt_log_probs": True} if "return_log_probs" in wish else {})


def served(
    engine: InferenceEngine,
    asked: Requests,
    watch: AbstractContextManager[object],
    between: Callable[[int], None] | None = None,
) -> dict[str, object]:
    """Two requests at once at first, then one more every other step; `watch` is entered while steps run."""
    waiting, added = list(enumerate(asked)), []
    steps = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (len(added) < 2 or steps % 2):
            number, (prompt, wish) = waiting.pop(0)
            added.append(engine.add_request(number, list(prompt), RequestParams(ignore_eos=True, **wish)))
            if len(added) > 2:
                break
        with watch:
            engine.step_modern()
        steps += 1
        if between is not None:
            between(steps)
    records = [one.result() for one in added]
    return {"requests": [told(one) for one in records], "skipped": engine.core.counters.skipped_tokens, "steps": steps}


def told(record: RequestRecord) -> dict[str, object]:
    """Outputs of a request."""
    return {
        "tokens": list(record.generated_tokens),
        "log_probs": record.generated_log_probs,
        "prompt_log_probs": record.prompt_log_probs,
        "drafts": record.draft_token_count,
        "error": record.error,
    }


# Lives


def serve(kind: str, **settings: object) -> Life:
    """Cold, warm, in pieces."""
    return lambda watch: served(engine_of(kind, **settings), requests(), watch)


def serve_programs(kind: str, asked: Callable[[], Requests] = plain_requests, **settings: object) -> Life:
    """Steps of buckets, by graphs where there are some."""

    def live(watch: AbstractContextManager[object]) -> dict[str, object]:
        engine = engine_of(kind, cuda_graph_impl="local", num_cuda_graphs=1, **settings)
        engine.create_cuda_graphs()
        found = served(engine, asked(), watch)
        assert engine.core.statistics().counters.launched_ahead > 0, "no step was launched ahead (CU-6)"
        return found

    return live


def long_requests() -> Requests:
    """Prompts of several eager steps, beside requests that decode."""
    yield make_prompt(20), {"num_tokens_to_generate": 16, **DRAWN}
    yield make_prompt(840), {"num_tokens_to_generate": 5, **SCORED, "skip_prompt_log_probs": True}
    yield [*make_prompt(840)[:280], *make_prompt(560, 1)], {"num_tokens_to_generate": 4}


def long_prefills(kind: str) -> Life:
    """Prefills larger than any captured step, with the order in which steps are launched and their tokens read."""

    def live(watch: AbstractContextManager[object]) -> dict[str, object]:
        sizes = {"max_tokens": 280, "max_sequence_length": 900, "block_count": 200}
        sizes |= {"decode_share": 0.0}  # by default prefills beside decodes are bounded on CPUs alone
        engine = engine_of(kind, cuda_graph_impl="local", num_cuda_graphs=1, **sizes)
        capture_all(engine)
        order: list[str] = []
        with ordered(engine, order):
            found = served(engine, long_requests(), watch)
        return found | {"order": order}

    return live


def capture_all(engine: InferenceEngine) -> None:
    """Make the graphs of all buckets, also on the CPU, so that the same steps are launched ahead on both."""
    runner = engine.context.cuda_graph_runner
    for bucket in runner._buckets.all():
        runner._graphs_of(bucket)


@contextlib.contextmanager
def ordered(engine: InferenceEngine, order: list[str]) -> Iterator[None]:
    """Note launches of steps, eager ones apart, and reads of their tokens; steps have numbers."""
    runner, read = engine.context.cuda_graph_runner, Launched.result
    launched: list[Launched] = []

    def noted(name: str, launch: Callable[..., Launched]) -> Callable[..., Launched]:
        def noting(*arguments: object) -> Launched:
            launched.append(launch(*arguments))
            order.append(f"{name} {len(launched) - 1}")
            return launched[-1]

        return noting

    def read_noted(one: Launched) -> StepResult:
        order.append(f"read {next(i for i, other in enumerate(launched) if other is one)}")
        return read(one)

    captured, eager = noted("captured", runner.sample), noted("eager", runner.sample_eager)
    with (
        mock.patch.object(runner, "sample", captured),
        mock.patch.object(runner, "sample_eager", eager),
        mock.patch.object(Launched, "result", read_noted),
    ):
        yield


def interrupted(watch: AbstractContextManager[object]) -> dict[str, object]:
    """A suspend and a resume in the middle, and too few blocks, so that requests are paused."""
    engine = engine_of("hybrid", block_count=14, max_requests=3, max_tokens=24)

    def between(step: int) -> None:
        if step == 4:
            engine.suspend()
            engine.resume()

    return served(engine, plain_requests(), watch, between)


def new_weights(watch: AbstractContextManager[object]) -> dict[str, object]:
    """Write new weights in place in the middle of the life, and the old ones afterwards."""
    engine, model = engine_of("hybrid", cuda_graph_impl="local", num_cuda_graphs=1), model_of("hybrid")
    capture_all(engine)

    def between(step: int) -> None:
        if step in (4, 8):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()
            engine.weights_changed()

    return served(engine, plain_requests(), watch, between)


def drafted(method: str) -> Life:
    """Life with drafts by n-grams, or by a layer of multi-token prediction."""

    def live(watch: AbstractContextManager[object]) -> dict[str, object]:
        speculation = SpeculationConfig(method, 3, speculative_adaptive=False, speculative_ngram_shortest=1)
        asked = [(prompt, wish) for prompt, wish in requests() if "presence_penalty" not in wish]
        asked.append((make_prompt(20), {"num_tokens_to_generate": 12, "logit_bias": {5: 100.0}}))  # again and again
        kind = PREDICTING if method == "mtp" else "hybrid"
        return served(engine_of(kind, speculation=speculation), iter(asked), watch)

    return live


def embedded(watch: AbstractContextManager[object]) -> dict[str, object]:
    """A checkpoint from files, answers with a form, bad words, in bf16."""
    loaded = load_model(SourceConfig(bf16=True), {})
    batching = BatchingConfig(block_size=16, block_count=60, max_requests=4, operator_backend="reference")
    engine = build_engine(
        loaded.model, loaded.config, loaded.tokenizer, batching, CacheConfig(snapshot_slots=4), dtype=loaded.dtype
    )
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    wishes = [
        RequestParams(num_tokens_to_generate=12, response_format=form),
        RequestParams(num_tokens_to_generate=6, bad_words=("Return",)),
    ]
    added = [engine.add_request(number, "What does json.loads do?", wish) for number, wish in enumerate(wishes)]
    while engine.has_unfinished_requests():
        with watch:
            engine.step_modern()
    return {"requests": [told(one.result()) for one in added], "skipped": engine.core.counters.skipped_tokens}


LIVES: dict[str, Life] = {
    **{kind: serve(kind) for kind in ("hybrid", "mamba1", "gated_delta_net", "short_conv", "side_by_side", "experts")},
    "align": serve("hybrid", cache=CacheConfig(snapshot_slots=6, snapshot_mode="align")),
    "no cache": serve("hybrid", cache=CacheConfig(enable_prefix_caching=False)),
    "programs": serve_programs("hybrid"),
    "programs of a delta net": serve_programs("gated_delta_net"),
    "programs with all wishes": serve_programs("experts", wished, max_tokens=80),
    "long prefills": long_prefills("hybrid"),
    "long prefills of experts": long_prefills("experts"),
    "interrupted": interrupted,
    "new weights": new_weights,
    "n-grams": drafted("ngram"),
    "prediction": drafted("mtp"),
    "embedded": embedded,
}
"""That run with every run of the tests."""


def few(kind: str, **settings: object) -> Life:
    """Requests for a few steps with all features, for slow backends."""

    def live(watch: AbstractContextManager[object]) -> dict[str, object]:
        short = {"num_tokens_to_generate": 3, "min_tokens": 0}
        asked = [(prompt, wish | short) for prompt, wish in list(requests())[:4]]
        return served(engine_of(kind, **settings), iter(asked), watch)

    return live


def few_programs(kind: str) -> Life:
    """Life with captured steps of one size."""

    def live(watch: AbstractContextManager[object]) -> dict[str, object]:
        settings = {"cuda_graph_impl": "local", "num_cuda_graphs": 1, "max_requests": 2, "operator_backend": "triton"}
        return served(engine_of(kind, **settings), iter(list(plain_requests())[:3]), watch)

    return live


KERNEL_LIVES: dict[str, Life] = {
    **{f"{kind} by kernels": few(kind, operator_backend="triton") for kind in ("wide", "mamba1", "gated_delta_net")},
    "unasked": few("wide", operator_backend="auto"),
    "programs of kernels": few_programs("wide"),
}
"""With kernels, interpreted: `make test-kernels`."""
