"""Correctness checks: a small model in fp32, with the device's operators and with the reference operators.

- log-probs beside those of plain torch, up to the first tokens that differ, which must be about as likely;
- tokens of captured steps, replayed as CUDA graphs, beside those of eager steps;
- log-probs, processed logits and draws of captured steps beside those of eager steps;
- steps of decode launched with `torch.cuda.set_sync_debug_mode("error")`: none of them waits for the device;
- tokens after a cached prefix beside those without any cache.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import tiles
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.shapes import SMALL, engine_for, model_config
from benchmarks.gpu.work import Figures, Prompt, prompt
from megatron_ext.config import ModelConfig, RequestParams
from megatron_ext.config.token_biases import TokenBiases
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.build import build_model
from megatron_ext.runner.cuda_graphs.cuda_graph_runner import CudaGraphRunner
from megatron_ext.scheduling.record import RequestRecord

PARITY = 2e-3  # of log-probs in fp32, whose products may be rounded to tf32
LENGTHS = (200, 65, 64, 7)
WITHOUT_PROGRAMS = {"cuda_graph_impl": "none"}
WITH_PROGRAMS = {"cuda_graph_impl": "local"}
WISHES: dict[str, Any] = {
    "top_n_logprobs": 3,
    "temperature": 0.8,
    "seed": 11,
    "min_p": 0.01,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "logit_bias": TokenBiases.of({5: 1.5}),
}
GENERATED = 24


class Checks:
    """Checks of one kind of recurrent layer.

    Args:
        kind: Kind of recurrent layers.
        device: Device that computes.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self._config, self._device = model_config(kind, SMALL), device
        self._model = build_model(self._config, device=device, seed=3)
        vocabulary = self._config.vocab_size
        assert vocabulary is not None, "the shape says it"
        self._prompts = [prompt(length, vocabulary, f"right {length}") for length in LENGTHS]
        self._plain = RequestParams(num_tokens_to_generate=GENERATED, ignore_eos=True)
        self._asking = dataclasses.replace(self._plain, return_log_probs=True, skip_prompt_log_probs=True)

    def log_probs(self) -> Figures:
        """Compare log-probs of the device's operators with those of the reference operators."""
        reference = self._served(self._asking, operator_backend="reference", **WITHOUT_PROGRAMS)
        ours = self._served(self._asking, **WITHOUT_PROGRAMS)
        found = max(difference(one, other) for one, other in zip(ours, reference, strict=True))
        return {"log-probs differ by": found, "log-probs are right": found <= PARITY}

    def graphs(self) -> Figures:
        """Compare tokens of replayed steps with those of eager steps."""
        eager = self._served(self._asking, **WITHOUT_PROGRAMS)
        graphs = self._served(self._plain, **WITH_PROGRAMS)
        return {"graphs give the same tokens": all(map(_is_like, graphs, eager))}

    def metadata(self) -> Figures:
        """Compare log-probs, processed logits and draws of replayed steps with those of eager steps."""
        asking = dataclasses.replace(self._asking, **WISHES)
        plain = self._served(asking, **WITHOUT_PROGRAMS)
        ours = self._served(asking, **WITH_PROGRAMS)
        found = max(difference(one, other) for one, other in zip(ours, plain, strict=True))
        alike = min(_alike(one, other) for one, other in zip(ours, plain, strict=True))
        right = {"programs with wishes are right": found <= PARITY and alike > 0}
        return {"wishes: log-probs differ by": found, "wishes: tokens alike at least": alike, **right}

    def cached(self) -> Figures:
        """Compare a request after a cached prefix with the same request served before."""
        engine = self._engine(**WITHOUT_PROGRAMS)
        first, second = (engine.generate([self._prompts[0]], self._asking)[0] for _ in range(2))
        engine.suspend()
        found = difference(second, first)
        is_right = found <= PARITY and second.skipped_prefill_token_count > 0
        return {"cached prefix: log-probs differ by": found, "cached prefix is right": is_right}

    def tiles(self) -> Figures:
        """The kernels that small models in fp32 do not have; the same for every kind."""
        return tiles.check(self._device)

    def silence(self) -> Figures:
        """Check that decode steps are launched without waiting for the device; NaN on a CPU, where each step waits."""
        if not torch.cuda.is_available():
            return {"no step of decode waits": float("nan")}
        return {"no step of decode waits": launches_without_waiting(self._model, self._config, self._prompts)}

    def _engine(self, **batching: object) -> InferenceEngine:
        return engine_for(self._model, self._config, torch.float32, 8, 512, **batching)

    def _served(self, row_metadata: RequestParams, **batching: object) -> list[RequestRecord]:
        engine = self._engine(**batching)
        records = engine.generate(list(self._prompts), row_metadata)
        engine.suspend()
        return records


def check(kind: str, device: torch.device, notes: Notes) -> None:
    """All of it, as figures of the notes; the last one says whether all is right."""
    checks = Checks(kind, device)
    rows = ("log_probs", "cached", "graphs", "metadata", "tiles", "silence")
    came = [notes.attempt(f"right: {row}", getattr(checks, row)) for row in rows]
    found = notes.page["found"]
    wanted = (
        "log-probs are right",
        "cached prefix is right",
        "graphs give the same tokens",
        "programs with wishes are right",
        "ssd by tiles is right",
        "no step of decode waits",
    )
    notes.tell("ok", all(came) and all(bool(found[row]) for row in wanted))


def difference(one: RequestRecord, other: RequestRecord) -> float:
    """Largest difference of log-probs up to the first differing tokens.

    Those must be about as likely, since random weights have near ties.
    """
    found = 0.0
    pairs = zip(one.generated_tokens, other.generated_tokens, one.generated_log_probs, other.generated_log_probs)  # type: ignore[arg-type]  # noqa: B905 - asked for; ties end it
    for token, like, log_prob, value in pairs:
        found = max(found, abs(log_prob - value))
        if token != like:
            break
    return found


def _is_like(replayed: RequestRecord, eager: RequestRecord) -> bool:
    return replayed.generated_tokens == eager.generated_tokens


def _alike(one: RequestRecord, other: RequestRecord) -> int:
    """Tokens up to the first that differ; random weights have near ties, and draws borders."""
    pairs = zip(one.generated_tokens, other.generated_tokens, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def launches_without_waiting(model: torch.nn.Module, config: ModelConfig, prompts: Sequence[Prompt]) -> bool:
    """Return whether steps with only decoding requests are launched by CUDA graphs without waiting for the device."""
    engine = engine_for(model, config, torch.float32, 8, 512, **WITH_PROGRAMS)
    row_metadata = RequestParams(num_tokens_to_generate=GENERATED, ignore_eos=True)
    for number, one in enumerate(prompts):
        engine.add_request(number, one, row_metadata)
    while any(not engine.get_request(number).is_decoding for number in range(len(prompts))):
        engine.step_modern()
    try:
        with waiting_is_an_error() as launches:
            for _ in range(4):
                engine.step_modern()
    except RuntimeError as error:
        print(f"a step of decode waits for the device: {error}", file=sys.stderr)
        return False
    finally:
        engine.suspend()
    return launches[0] > 0


@contextmanager
def waiting_is_an_error() -> Iterator[list[int]]:
    """Make waiting an error during launches; tokens are waited for afterwards. The list counts the launches."""
    launch, count = CudaGraphRunner.launch, [0]

    def watched(*arguments: object, **options: object) -> object:
        count[0] += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(*arguments, **options)  # type: ignore[arg-type]  # whatever it takes
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(CudaGraphRunner, "launch", watched):
        yield count
