"""Sampling of a step's rows from its logits, by eager and by captured steps: equal tokens and log-probs, to the bit."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ext.config import RequestParams
from megatron_ext.config.request import TokenBiases
from megatron_ext.engine.result import StepResult
from megatron_ext.ops import triton
from megatron_ext.ops.sampling import SAMPLING, reference
from megatron_ext.runner import sampler
from megatron_ext.runner import sampler as runner_sampler
from megatron_ext.runner.cuda_graphs import graph_sampler
from megatron_ext.runner.cuda_graphs.async_output import Launched, output_layout
from megatron_ext.runner.cuda_graphs.buckets import MAX_LISTED
from megatron_ext.runner.cuda_graphs.graph_capture import Capture
from megatron_ext.runner.cuda_graphs.graph_sampler import GraphSampler
from megatron_ext.runner.cuda_graphs.input_buffers import AsyncModelOutput, InputBuffers
from megatron_ext.runner.logits_processors import (
    PROCESSORS,
    TOKEN_LISTS,
    entry_counts,
    logits_layout,
    room_for,
    unsent_entries,
    write_logits_inputs,
)
from megatron_ext.runner.model_input import SamplingRow
from megatron_ext.runner.sampler import sampler_needs_of, sampling_layout, write_sampling_options
from megatron_ext.runner.step_output import sample_and_score
from megatron_ext.scheduling.step import LogitsOptions, Sampling
from tests.unit_tests.ops.backends import usable
from tests.unit_tests.support.replay import ReplayedGraphs

WORDS, ROWS = 150, 12
MASK = -(-WORDS // 32)  # numbers of a mask
CPU = torch.device("cpu")
PADDING = (4, ROWS - 1)
BASE = sampling_layout(ROWS)
Rows = list[Sampling | None]


class Eager:
    """Sampling as an eager step does it, with raw or with processed log-probs."""

    def __init__(self, *, is_processed: bool = False) -> None:
        self.is_processed = is_processed

    def choose(self, logits: Tensor, rows: Rows) -> StepResult:
        asking = [i for i, one in enumerate(rows) if one is not None]
        step = SimpleNamespace(sampling=[SamplingRow(i, rows[i]) for i in asking], prompt_scores=[])
        own = logits[asking] if len(asking) < len(rows) else logits
        return sample_and_score(own, step, lambda _: None, is_processed=self.is_processed)


class Captured:
    """Static buffers full of garbage, and the sampling graphs of a bucket over them."""

    def __init__(
        self, graphs: object = None, dtype: torch.dtype = torch.float32, *, is_processed: bool = False
    ) -> None:
        room = room_for(ROWS)
        self.processed, self.masked = (BASE | logits_layout(ROWS, room, WORDS, has_mask=one) for one in (False, True))
        self.output = output_layout(ROWS, WORDS)
        self.buffers = InputBuffers([self.masked], CPU, self.output.count)
        self.outputs = AsyncModelOutput(self.buffers.answer, CPU)
        for whole in (self.buffers._device, *(one.whole for one in self.buffers._host)):
            whole.fill_((5 << 32) + 77)
        self.logits = torch.zeros(ROWS, WORDS, dtype=dtype)
        self.write(rows_of(0)[:1] + [None] * (ROWS - 1))
        parts = self.buffers.parts(self.masked), self.output.parts(self.buffers.answer)
        self.graphs = GraphSampler(graphs or Capture(), self.logits, *parts, has_processed_log_probs=is_processed)

    def write(self, rows: Rows) -> None:
        needs = sampler_needs_of(rows)
        layout = self.masked if needs.has_mask else self.processed if needs.is_processed else BASE
        arrays, unsent = self.buffers.open(layout), 0
        write_sampling_options(rows, arrays)
        if needs.is_processed:
            used = write_logits_inputs(rows, WORDS, arrays)
            unsent = 0 if needs.has_mask else unsent_entries(room_for(ROWS), used)
        self.buffers.send(layout, unused=unsent)

    def fetch(self, rows: Rows, *, is_scored: bool) -> StepResult:
        return Launched(self.outputs, self.output, [*enumerate(rows)], is_scored=is_scored).result()

    def choose(self, logits: Tensor, rows: Rows) -> StepResult:
        rows = [*rows, *[None] * (ROWS - len(rows))]
        self.logits[:] = torch.nan
        self.logits[: len(logits)] = logits
        self.write(rows)
        with torch.inference_mode():
            self.graphs.run(sampler_needs_of(rows))
        return self.fetch(rows, is_scored=sampler_needs_of(rows).is_scored)


# Triton's interpreter is too slow for these; `tests/unit_tests/ops/test_sampling_triton.py` has its draws.
@pytest.fixture(params=[name for name in usable(SAMPLING) if name != triton.NAME])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw by each backend that runs here."""
    with SAMPLING.forced(request.param):
        yield


@pytest.fixture(params=["eager", "captured", "captured in 16 bits"])
def choose(request: pytest.FixtureRequest) -> Callable[[Tensor, Rows], list[int]]:
    """The tokens of some rows, by an eager or a captured step."""
    dtype = torch.bfloat16 if "16" in request.param else torch.float32
    made = Eager() if request.param == "eager" else Captured(dtype=dtype)

    def call(logits: Tensor, rows: Rows) -> list[int]:
        return list(made.choose(logits.to(dtype), rows).tokens.values())

    return call


def sampling(uniform: float | None = None, options: LogitsOptions | None = None, **fields: object) -> Sampling:
    """Greedy, or drawn by this number."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "forbidden": (), "top_n": None}
    return Sampling(**{**plain, **fields}, uniform=uniform, logits_options=options)


def options_of(tokens: tuple[int, ...] = (), prompt: int = 0, bad_words: tuple = (), **params: object) -> LogitsOptions:
    return LogitsOptions(RequestParams(**params), array("I", tokens), prompt, bad_words)


# Rows in any mix


def mask_of(seed: float) -> bytes:
    """Half of the tokens."""
    return random.Random(seed).randbytes(4 * MASK)


def random_options(source: random.Random, *, masks: bool) -> LogitsOptions:
    """Every option in some rows, tokens that came more than once, words of two tokens whose first one has just come."""
    tokens = [source.randrange(WORDS // 3) for _ in range(30)]
    words = ((tokens[-1], 7), (source.randrange(WORDS),), (WORDS - 1, 3))
    params = RequestParams(
        repetition_penalty=source.choice([1, 1.3]),
        presence_penalty=source.choice([0, 0.7]),
        frequency_penalty=source.choice([0, -0.4, 1.1]),
        logit_bias=TokenBiases.of({source.randrange(WORDS): source.uniform(-5, 5) for _ in range(source.randrange(4))}),
        min_p=source.choice([0.0, 0.05, 0.5]),
    )
    return LogitsOptions(
        params=params,
        tokens=array("I", tokens),
        prompt_length=source.choice([4, 20]),
        bad_words=words if source.random() < 0.5 else (),
        allowed=mask_of(source.random()) if masks and source.random() < 0.5 else None,
    )


def random_sampling(source: random.Random, *, processed: bool, scored: bool, masks: bool) -> Sampling:
    is_greedy = source.random() < 0.4
    temperature, top_k = source.choice([(0.0, 5), (0.7, 1)]) if is_greedy else (source.uniform(0.3, 1.5), None)
    return sampling(
        None if is_greedy else source.random(),
        random_options(source, masks=masks) if processed and source.random() < 0.6 else None,
        temperature=temperature,
        top_k=source.choice([0, 5]) if top_k is None else top_k,
        top_p=source.choice([0.0, 0.9]),
        forbidden=tuple(source.choices([3, 9, -1, WORDS + 5], k=2)) if processed and source.random() < 0.4 else (),
        top_n=source.choice([None, 0, 3, MAX_LISTED]) if scored else None,
    )


def rows_of(seed: int, *, processed: bool = True, scored: bool = True, masks: bool = False) -> Rows:
    """Sampling options of rows, and two padding rows among them."""
    source = random.Random(seed)
    kinds = {"processed": processed, "scored": scored, "masks": masks}
    return [None if row in PADDING else random_sampling(source, **kinds) for row in range(ROWS)]


def logits_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows whose best tokens are forbidden or ruled out, and padding of NaN."""
    logits = torch.randn(ROWS, WORDS, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::3, [3, 9]], logits[1::3, 7] = 12.0, 12.0
    logits[list(PADDING)] = torch.nan
    return logits.to(dtype)


@pytest.mark.parametrize("is_processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("graphs", [Capture, ReplayedGraphs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_mix_of_rows_to_the_bit(dtype: torch.dtype, graphs: type, is_processed: bool, backend: None) -> None:
    """CU-5, SA-1, SA-2: greedy and drawn, processed and scored rows; ties of 16 bits; graphs that are used again."""
    captured, seen = Captured(graphs(), dtype, is_processed=is_processed), []
    for seed in range(12):
        rows = rows_of(seed, processed=seed % 3 > 0, scored=seed % 4 > 0, masks=seed % 2 > 0)
        logits = logits_of(seed, dtype)
        found, expected = captured.choose(logits, rows), Eager(is_processed=is_processed).choose(logits, rows)
        assert found.tokens == expected.tokens
        assert found.generated == expected.generated
        seen.append(expected)
    assert any(len(score.top_n) == MAX_LISTED for result in seen for score in result.generated.values())
    assert any(not result.generated for result in seen)


def processed_log_probs(logits: Tensor, one: Sampling) -> Tensor:
    """Log-probs [V] of the distribution of a row, by docs/sampling.md: one token and one filter after the other."""
    values, options = logits.double().clone(), one.logits_options or options_of()
    params, generated = options.params, list(options.tokens[options.prompt_length :])
    for token in set(options.tokens):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(generated):
        values[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        values[token] += bias
    if options.allowed is not None:
        bits = np.unpackbits(np.frombuffer(options.allowed, np.uint8), bitorder="little")[:WORDS]
        values[torch.from_numpy(bits == 0)] = -torch.inf
    values[list(options.ruled_out)] = -torch.inf
    values[[token for token in one.forbidden if 0 <= token < WORDS]] = -torch.inf
    if one.temperature == 0:
        return values.log_softmax(-1)
    values /= one.temperature
    values[values - values.amax() < np.log(max(params.min_p, 1e-300))] = -torch.inf
    order = values.argsort(descending=True, stable=True)
    values[order[one.top_k or WORDS :]] = -torch.inf
    shares = values.softmax(-1)[order]
    values[order[shares.cumsum(-1) - shares >= (one.top_p or 2)]] = -torch.inf
    return values.log_softmax(-1)


@pytest.mark.parametrize("made", [Eager, Captured])
def test_processed_log_probs_by_definition(made: type, backend: None) -> None:
    """SA-16: of drawn and of greedy rows; the drawn token is always possible, a listed one may be impossible."""
    differing = impossible = 0
    for seed in range(8):
        rows, logits = rows_of(seed, masks=seed % 2 > 0), logits_of(seed)
        found = made(is_processed=True).choose(logits, rows)
        raw = made().choose(logits, rows).generated
        for row, score in found.generated.items():
            expected = processed_log_probs(logits[row], rows[row])
            assert score.log_prob == pytest.approx(float(expected[found.tokens[row]]), abs=1e-5)
            assert np.isfinite(score.log_prob)
            listed = list(score.top_n)
            assert list(score.top_n.values()) == pytest.approx(expected[listed].tolist(), abs=1e-5)
            assert expected[listed].tolist() == pytest.approx(expected.topk(len(listed)).values.tolist(), abs=1e-5)
            differing += abs(score.log_prob - raw[row].log_prob) > 1e-3
            impossible += -torch.inf in score.top_n.values()
    assert differing > 30
    assert impossible > 10


def test_a_row_does_not_depend_on_the_others(backend: None) -> None:
    """EX-13, SA-1: each row of any mix alone, and logits that are left as they were."""
    for seed in range(4):
        rows, logits = rows_of(seed, masks=True), logits_of(seed)
        before = logits.clone()
        together = Eager().choose(logits, rows)
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        for i, one in enumerate(rows):
            if one is not None:
                assert Eager().choose(logits[i : i + 1], [one]).tokens[0] == together.tokens[i]
        scored = Eager(is_processed=True).choose(logits, rows).generated
        alone = {i: Eager(is_processed=True).choose(logits[i : i + 1], [rows[i]]).generated[0] for i in scored}
        assert alone == scored


@pytest.mark.parametrize("token", [-1, WORDS, 10**9])
def test_a_forbidden_token_outside_the_vocabulary(choose: Callable, token: int) -> None:
    """SA-2: the tokenizer's end token may be none of the model's; of equal best tokens the first one is taken."""
    logits = torch.zeros(3, WORDS)
    logits[1, [7, 90, 149]] = 5.0
    assert choose(logits, [sampling(forbidden=(token,))] * 3) == [0, 7, 0]


def test_in_16_bits_the_choice_is_made_in_32(choose: Callable) -> None:
    """SA-1: a penalty of a hundredth is below bfloat16's steps at these logits."""
    logits = torch.zeros(1, WORDS)
    logits[0, :2] = 8.0
    assert choose(logits, [sampling(None, options_of((1, 0), 1, presence_penalty=0.01))]) == [1]


def test_min_p_is_a_share_of_the_best_token_that_may_come(choose: Callable) -> None:
    """SA-1: a forbidden token is excluded before `min_p` takes shares; otherwise no token at all would be left."""
    logits = torch.zeros(1, WORDS)
    logits[0, 3], logits[0, 5], logits[0, 8] = 30.0, 9.0, 8.875
    options = options_of(min_p=0.5)
    drawn = [choose(logits, [sampling(one, options, forbidden=(3,))])[0] for one in (0.0, 0.3, 0.7, 0.9999)]
    assert drawn == [5, 5, 8, 8]


def test_where_nothing_would_be_left_bad_words_are_ignored(choose: Callable) -> None:
    """SA-1: bad words that exclude every token."""
    logits, every = torch.arange(WORDS).float()[None].expand(2, -1), tuple((token,) for token in range(WORDS))
    rows = [sampling(None, options_of(bad_words=every)), sampling(None, options_of(bad_words=every[1:]))]
    assert choose(logits, rows) == [WORDS - 1, 0]


def test_only_allowed_tokens_are_kept(choose: Callable) -> None:
    """SA-3: a mask of three tokens at the borders of its bytes and numbers; the row beside it has none."""
    bits = np.zeros(32 * MASK, dtype=np.uint8)
    bits[[1, 31, 69]] = 1
    options = dataclasses.replace(options_of(), allowed=np.packbits(bits, bitorder="little").tobytes())
    logits = torch.arange(WORDS).float()[None].expand(2, -1)
    assert choose(logits, [sampling(None, options), sampling()]) == [69, WORDS - 1]
    uniforms = [(i + 0.5) / 30 for i in range(10)]
    flat = torch.zeros(10, WORDS)
    assert {choose(flat, [sampling(3 * one, options)] * 10)[0] for one in uniforms} == {1, 31, 69}


# Costs


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """SE-2: scores and draws take no more memory than stated, for any rows; nothing else changes."""
    sizes = []
    for module, name in ((reference, "draw_sorted"), (graph_sampler, "log_probs_of")):
        function = getattr(module, name)

        def noted(logits: Tensor, *rest: object, function: object = function) -> object:
            sizes.append(len(logits))
            return function(logits, *rest)

        monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(sampler, "SCORING_BYTES", 5 * 12 * WORDS)
    rows, logits = rows_of(3), logits_of(3)
    with SAMPLING.forced("reference"):
        captured = Captured()
        sizes.clear()
        found = captured.choose(logits, rows)
        assert sizes == [1] * ROWS + [5, 5, 2]
        expected = Eager().choose(logits, rows)
    assert (found.tokens, found.generated) == (expected.tokens, expected.generated)
    assert max(sizes) == 5


# Captured steps alone


@pytest.mark.parametrize("name", TOKEN_LISTS)
def test_each_list_matters(name: str) -> None:
    """The negative control: with a list left empty some token is another one."""
    captured, place = Captured(), list(TOKEN_LISTS).index(name)
    captured.choose(logits_of(1), rows_of(1))
    differing = 0
    for seed in range(8):
        rows = rows_of(seed)
        expected = captured.choose(logits_of(seed), rows).tokens
        captured.buffers.parts(captured.masked)["used"][place] = 0
        captured.graphs.run(sampler_needs_of(rows))
        found = captured.fetch(rows, is_scored=True).tokens
        differing += sum(found[one] != expected[one] for one in expected)
    assert differing


@pytest.mark.parametrize("one", PROCESSORS, ids=lambda one: one.apply.__name__)
def test_neutral_inputs_change_nothing(one: object) -> None:
    """CU-4: rows without options keep their logits in every processor."""
    captured = Captured()
    arrays = captured.buffers.open(captured.masked)
    write_logits_inputs([sampling(0.5)] * (ROWS - 1) + [None], WORDS, arrays)
    parts = {name: torch.from_numpy(array) for name, array in arrays.items()}
    logits = logits_of(5)[[0, 1, 2, 3, 5]].repeat(3, 1)[:ROWS]
    assert torch.equal(runner_sampler.process_logits(logits, parts, [one]), logits)


def test_room_of_a_captured_step() -> None:
    """CU-5: tokens that came count as often as they came, those of prompts for repetition alone."""

    def has_room(one: Sampling, count: int, rows: int) -> bool:
        needed, room = entry_counts([one] * count, WORDS), room_for(rows)
        return all(needed[name] <= room[name] for name in room)

    def long(**params: object) -> Sampling:
        return sampling(0.5, options_of((1,) * 9000, 6000, presence_penalty=0.5, **params))

    assert has_room(long(), 1, 1)
    assert not has_room(long(), 2, 1)
    assert has_room(long(), 2, 2)
    assert not has_room(long(repetition_penalty=1.1), 1, 1)
    assert not has_room(sampling(forbidden=tuple(range(65))), 1, 1)
    biases = TokenBiases.of(dict.fromkeys(range(513), 1.0))
    assert not has_room(long(logit_bias=biases), 1, 1)
