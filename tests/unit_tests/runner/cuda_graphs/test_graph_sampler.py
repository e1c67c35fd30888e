"""Captured sampling from logits in a static buffer: tokens and log-probs equal eager ones to the bit."""

from __future__ import annotations

import dataclasses
import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_ext.config.token_biases import TokenBiases
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore.controller import choose_tokens
from megatron_ext.ops.sampling import SAMPLING, graph_sampling
from megatron_ext.runner import scoring
from megatron_ext.runner.cuda_graphs import graph_sampler, logits_buffers
from megatron_ext.runner.cuda_graphs.async_output import fetch, output_layout
from megatron_ext.runner.cuda_graphs.buckets import MAX_LISTED
from megatron_ext.runner.cuda_graphs.graph_capture import NoGraphs
from megatron_ext.runner.cuda_graphs.graph_sampler import GraphSampler, sampler_needs_of, samplings_of
from megatron_ext.runner.cuda_graphs.input_batch import NOBODY, InputBatch
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, InputBuffers, Layout
from megatron_ext.runner.cuda_graphs.logits_buffers import has_capacity, with_logits_buffers, write_logits_buffers
from megatron_ext.runner.cuda_graphs.structured_output_masks import with_masks, write_masks
from megatron_ext.runner.model_input import SamplingRow
from megatron_ext.scheduling.logits_options import LogitsOptions
from megatron_ext.scheduling.step import Sampling, ScheduledChunk
from tests.priority import TestPriority
from tests.unit_tests.support.programs import ProgramRecorder, differences
from tests.unit_tests.support.replay import ReplayedGraphs

pytestmark = pytest.mark.priority(TestPriority.HIGH)

WORDS, ROWS = 150, 12
MASK = -(-WORDS // 32)  # numbers of a mask
CPU = torch.device("cpu")
_DRAWS = ("temperature", "top_p", "uniform")
BASE = Layout({"top_k": (ROWS,), **dict.fromkeys(_DRAWS, (ROWS,))}, frozenset(_DRAWS))


def mask_of(seed: float) -> bytes:
    """Half of the tokens."""
    return random.Random(seed).randbytes(4 * MASK)


def logits_options_of(source: random.Random, *, forms: bool) -> LogitsOptions:
    """Every wish in some rows, tokens that came more than once, words of two tokens whose first one has just come."""
    tokens = [source.randrange(WORDS // 3) for _ in range(30)]
    words = ((tokens[-1], 7), (source.randrange(WORDS),), (WORDS - 1, 3))
    return LogitsOptions(
        tokens=array("i", tokens),
        prompt_length=source.choice([4, 20]),
        repetition=source.choice([1, 1.3]),
        presence=source.choice([0, 0.7]),
        frequency=source.choice([0, -0.4, 1.1]),
        biases=TokenBiases.of({source.randrange(WORDS): source.uniform(-5, 5) for _ in range(source.randrange(4))}),
        bad_words=words if source.random() < 0.5 else (),
        min_p=source.choice([0.0, 0.05, 0.5]),
        allowed=mask_of(source.random()) if forms and source.random() < 0.5 else None,
    )


def sampling(source: random.Random, *, shapes: bool = True, scores: bool = True, forms: bool = False) -> Sampling:
    is_greedy = source.random() < 0.4
    row_metadata = logits_options_of(source, forms=forms) if shapes and source.random() < 0.6 else None
    if is_greedy and row_metadata is not None:
        row_metadata = dataclasses.replace(row_metadata, min_p=0.0)
    return Sampling(
        temperature=0.0 if is_greedy else source.uniform(0.3, 1.5),
        top_k=source.choice([0, 5]),
        top_p=source.choice([0.0, 0.9]),
        uniform=None if is_greedy else source.random(),
        forbidden=tuple(source.choices([3, 9, -1, WORDS + 5], k=2)) if shapes and source.random() < 0.4 else (),
        top_n=source.choice([None, 0, 3, MAX_LISTED]) if scores else None,
        logits_options=row_metadata,
    )


def chunk(row: int, row_metadata: Sampling | None) -> ScheduledChunk:
    return ScheduledChunk(NOBODY if row_metadata is None else row, (0,), 0, 1, True, (), 0, row, sampling=row_metadata)


def chunks_of(seed: int, **kinds: bool) -> list[ScheduledChunk]:
    """Chunks with sampling options, and two padding rows among them."""
    source = random.Random(seed)
    return [chunk(row, None if row in (4, ROWS - 1) else sampling(source, **kinds)) for row in range(ROWS)]


def logits_of(seed: int, dtype: torch.dtype) -> Tensor:
    """Rows whose best tokens are forbidden or ruled out, and padding of NaN."""
    logits = torch.randn(ROWS, WORDS, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::3, [3, 9]], logits[1::3, 7] = 12.0, 12.0
    logits[[4, ROWS - 1]] = torch.nan
    return logits.to(dtype)


class Fixed:
    """Places full of garbage, and the programs of a bucket over them."""

    def __init__(self, graphs: object = None, dtype: torch.dtype = torch.float32) -> None:
        self.shaped, self.answer = with_logits_buffers(BASE, ROWS), output_layout(ROWS, WORDS)
        self.layout = with_masks(self.shaped, ROWS, WORDS)
        self.places = InputBuffers([self.layout], CPU, self.answer.count)
        self.answers = AsyncModelOutput(self.places.answer, CPU)
        for whole in (self.places._device, *(one.whole for one in self.places._host)):
            whole.fill_((5 << 32) + 77)
        self.logits = torch.zeros(ROWS, WORDS, dtype=dtype)
        self.write(chunks_of(0)[:1] + [chunk(row, None) for row in range(1, ROWS)])
        parts = self.places.parts(self.layout), self.answer.parts(self.places.answer)
        self.programs = GraphSampler(graphs or NoGraphs(), self.logits, *parts)

    def write(self, chunks: list[ScheduledChunk]) -> None:
        wanted = sampler_needs_of(samplings_of(chunks))
        layout = self.layout if wanted.has_mask else self.shaped if wanted.is_processed else BASE
        arrays = self.places.open(layout)
        InputBatch._write_sampling_metadata(chunks, arrays)
        unused = write_logits_buffers(chunks, WORDS, arrays) if wanted.is_processed else 0
        if wanted.has_mask:
            write_masks(chunks, arrays["masks"])
        self.places.send(layout, unused=0 if wanted.has_mask else unused)

    def choose(self, logits: Tensor, chunks: list[ScheduledChunk]) -> StepResult:
        wanted = sampler_needs_of(samplings_of(chunks))
        self.logits.copy_(logits)
        self.write(chunks)
        with torch.inference_mode():
            self.programs.run(wanted)
        return fetch(self.answers, self.answer, chunks, is_scored=wanted.is_scored).result()


def plain(logits: Tensor, chunks: list[ScheduledChunk]) -> StepResult:
    asking = [one for one in chunks if one.sampling is not None]
    rows = [SamplingRow(one.request_id, one.sampling) for one in asking]
    step = SimpleNamespace(sampling=rows, prompt_scores=[])
    logits = logits[[i for i, one in enumerate(chunks) if one.sampling is not None]]
    with SAMPLING.forced("reference"):
        return choose_tokens(logits, step, lambda _: None)


@pytest.mark.parametrize("graphs", [NoGraphs, ReplayedGraphs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mix_of_wishes_to_the_bit(dtype: torch.dtype, graphs: type) -> None:
    """CU-5, SA-1, SA-2: greedy and drawn rows, shaped and scored in any mix; ties of 16 bits; programs used again."""
    fixed, seen = Fixed(graphs(), dtype), []
    for seed in range(12):
        chunks = chunks_of(seed, shapes=seed % 3 > 0, scores=seed % 4 > 0, forms=seed % 2 > 0)
        logits = logits_of(seed, dtype)
        found, expected = fixed.choose(logits, chunks), plain(logits, chunks)
        assert found.tokens == expected.tokens
        assert found.generated == expected.generated
        seen.append(expected)
    assert any(len(score.top_n) == MAX_LISTED for result in seen for score in result.generated.values())
    assert any(not result.generated for result in seen)


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """SE-2: scores and draws take no more memory than stated, for any rows; nothing else changes."""
    sizes = []
    for module, name in ((graph_sampling, "draw_sorted"), (graph_sampler, "log_probs_of")):
        function = getattr(module, name)

        def noted(logits: Tensor, *rest: object, function: object = function) -> object:
            sizes.append(len(logits))
            return function(logits, *rest)

        monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(scoring, "SCORING_BYTES", 5 * 12 * WORDS)
    chunks, logits = chunks_of(3), logits_of(3, torch.float32)
    fixed = Fixed()
    sizes.clear()
    found, expected = fixed.choose(logits, chunks), plain(logits, chunks)
    assert (found.tokens, found.generated) == (expected.tokens, expected.generated)
    assert sizes == [1] * ROWS + [5, 5, 2]


@pytest.mark.parametrize("name", ["came", "biased", "ruled_out", "forbidden"])
def test_each_list_matters(name: str) -> None:
    """The negative control: with a list left empty some token is another one."""
    fixed, place = Fixed(), list(logits_buffers._ROOM).index(name)
    fixed.choose(logits_of(1, torch.float32), chunks_of(1))
    differing = 0
    for seed in range(8):
        chunks, logits = chunks_of(seed), logits_of(seed, torch.float32)
        expected = fixed.choose(logits, chunks).tokens
        fixed.places.parts(fixed.layout)["used"][place] = 0
        fixed.programs.run(sampler_needs_of(samplings_of(chunks)))
        found = fetch(fixed.answers, fixed.answer, chunks, is_scored=True).result().tokens
        differing += sum(found[one] != expected[one] for one in expected)
    assert differing


def test_masks_matter() -> None:
    """The negative control: with every token allowed some token is another one."""
    fixed, chunks, logits = Fixed(), chunks_of(2, forms=True), logits_of(2, torch.float32)
    guided = fixed.choose(logits, chunks).tokens
    fixed.places.parts(fixed.layout)["masks"].fill_(-1)
    fixed.programs.run(sampler_needs_of(samplings_of(chunks)))
    found = fetch(fixed.answers, fixed.answer, chunks, is_scored=True).result().tokens
    assert found != guided


def test_two_steps_are_the_same_program() -> None:
    """CU-5: shaped, drawn and scored, whatever is asked; nothing is read back and nothing comes from the host."""
    fixed, programs = Fixed(), []
    for seed in (1, 3):
        chunks = chunks_of(seed, forms=True)
        fixed.write(chunks)
        wanted = sampler_needs_of(samplings_of(chunks))
        assert all(wanted)
        programs.append(ProgramRecorder())
        with programs[-1]:
            fixed.programs.run(wanted)
    first, second = programs
    assert len(first.operations) > 50
    assert not differences(first, second)
    assert not first.unfit


def test_what_nobody_asks_for_is_neither_sent_nor_computed_nor_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CU-5: the lists stay here, one program runs, the tokens alone come back."""
    fixed, sent, fetched = Fixed(graphs := ReplayedGraphs()), [], []
    send, fetched_by = fixed.places.send, fixed.answers.fetch
    monkeypatch.setattr(fixed.places, "send", lambda layout, **rest: (sent.append(layout), send(layout, **rest)))
    monkeypatch.setattr(fixed.answers, "fetch", lambda count: (fetched.append(count), fetched_by(count))[1])
    for kinds in ({"shapes": False, "scores": False}, {}):
        graphs.replayed = 0
        fixed.choose(logits_of(2, torch.float32), chunks_of(2, **kinds))
        fetched.append(graphs.replayed)
    assert sent == [BASE, fixed.shaped]
    assert fetched == [ROWS, 1, fixed.answer.count, 2]


def test_what_is_more_than_there_is_room_for() -> None:
    """CU-5: tokens that came count as often as they came, those of prompts for repetition alone."""
    row_metadata = sampling(random.Random(1), scores=False)
    long = LogitsOptions(array("i", [1] * 9000), 6000, 1.0, 0.5, 0.0, TokenBiases(), (), 0.0)
    shaped = dataclasses.replace(row_metadata, logits_options=long)
    assert has_capacity([shaped], 1)
    assert not has_capacity([shaped, shaped], 1)
    assert has_capacity([shaped, shaped], 2)
    assert not has_capacity([dataclasses.replace(shaped, logits_options=dataclasses.replace(long, repetition=1.1))], 1)
    assert not has_capacity([dataclasses.replace(row_metadata, forbidden=tuple(range(65)))], 1)
    biases = TokenBiases.of(dict.fromkeys(range(513), 1.0))
    assert not has_capacity([dataclasses.replace(shaped, logits_options=dataclasses.replace(long, biases=biases))], 1)


def test_the_forbidden_best_token_is_no_measure_for_min_p() -> None:
    """SA-1: `min_tokens` rules out before `min_p` takes shares; otherwise no token at all would be left."""
    logits = torch.zeros(1, WORDS)
    logits[0, 3], logits[0, 5] = 30.0, 5.0
    row_metadata = LogitsOptions(array("i"), 0, 1.0, 0.0, 0.0, TokenBiases(), (), 0.5)
    chunks = [chunk(0, Sampling(1.0, 0, 0.0, 0.9, (3,), None, row_metadata))]
    assert plain(logits, chunks).tokens == {0: 5}
    padded = [*chunks, *[chunk(row, None) for row in range(1, ROWS)]]
    assert Fixed().choose(logits.expand(ROWS, -1), padded).tokens == {0: 5}
