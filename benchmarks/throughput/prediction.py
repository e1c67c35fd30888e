"""Tokens a second with and without drafts of multi-token prediction, and how many of its drafts are accepted.

    greedy, sampled   answers to the shipped prompts, at temperature 0 and 1: K fixed at 1 to 3, and adaptive up to 3
    prose             the sampled answers: drafts of n-grams and of the layer, each adaptive
    editing           the same methods where the answer is the prompt's text with a token in 40 changed. The answer is
                      imposed on the model, which computes as ever; the layer of a model that edits would be better

A round is a run of each engine in turns; a ratio is the median of the rounds' ratios. Each engine has a model of its
own, since the layer watches the trunk with a hook. The first step, which computes all prompts, is not timed; what the
layer reads of them is. Costs of drafts are measured at the start of each engine, except in a quick run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import ne
from pathlib import Path
from unittest import mock

from benchmarks.cases import Figure, Run, case
from benchmarks.measuring import own_time, synchronize
from benchmarks.models import OFF, Engine, inference_engine
from benchmarks.throughput.draft_context import load_predicting, with_random_layer
from megatron_ext.config import RequestParams
from megatron_ext.config.speculation import NO_SPECULATION, SpeculationConfig
from megatron_ext.engine.result import StepResult
from megatron_ext.mcore import platform
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.mcore.step_executor import StepExecutor
from megatron_ext.models.load import LoadedModel
from megatron_ext.offline.prompts import example_prompts
from megatron_ext.scheduling.step import ScheduledStep

DRAFTS = 3
METHODS = ("ngram", "mtp")
LONGEST, MOST_REQUESTS, BLOCK = 768, 32, 64  # tokens of a request, requests at once
CHANGED_EVERY = 40  # tokens of an edited text
ALONE = 6  # requests of a run with one at a time, one after the other
PLAIN, DRAFTED, RATIO = "plain, tokens/s", "drafts, tokens/s", "with / without"
Texts = list[tuple[list[int], list[int]]]
"""Prompts and imposed answers; an empty answer is the model's own."""


@dataclass
class Arm:
    """Engine that takes its turn.

    Attributes:
        name: Name in the rows.
        inference: The engine.
        rates: Tokens a second of each round.
        answers: Generated tokens of the last round.
    """

    name: str
    inference: InferenceEngine
    rates: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = Engine(self.inference.core)
        self._imposed: dict[int, list[int]] = {}  # whole texts by request id

    @classmethod
    def of(cls, name: str, loaded: LoadedModel, speculation: SpeculationConfig = NO_SPECULATION) -> Arm:
        """Build an engine for the largest work."""
        sizes = {"block_size": BLOCK, "block_count": MOST_REQUESTS * (LONGEST // BLOCK), "max_requests": MOST_REQUESTS}
        steps = {"max_tokens": MOST_REQUESTS * LONGEST, "max_prefills_per_step": 0}
        return cls(name, inference_engine(loaded, OFF, speculation, **sizes, **steps))

    @property
    def counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Drafted and accepted tokens by depth, since the engine was built."""
        use = self.inference.core.statistics().speculation
        return ((), ()) if use is None else (use.drafted, use.accepted)

    def round(self, texts: Texts, count: int, params: RequestParams) -> None:
        """Serve texts, `count` at once, and note the rate."""
        self.answers.clear()
        taken = 0.0
        with mock.patch.object(StepExecutor, "compute_eagerly", self._imposing(StepExecutor.compute_eagerly)):
            for first in range(0, len(texts), count):
                taken += self._decode(texts[first : first + count], replace(params, seed=first))
        self.rates.append(sum(map(len, self.answers)) / taken)

    def _decode(self, texts: Texts, params: RequestParams) -> float:
        """Serve texts at once; return the seconds after the first step, which computes the prompts."""
        for i, (prompt, answer) in enumerate(texts):
            request = self.engine.add(prompt, replace(params, seed=params.seed + i))
            if answer:
                self._imposed[request.request_id] = [*prompt, *answer]
        self.engine.step()
        start = own_time()
        records = sorted(self.engine.drain(), key=lambda record: record.request_id)
        synchronize()
        self.answers += [record.generated_tokens[1:] for record in records]
        self._imposed.clear()
        return own_time() - start

    def _imposing(self, compute: Callable[[StepExecutor, ScheduledStep], StepResult]) -> Callable[..., StepResult]:
        def imposed(executor: StepExecutor, step: ScheduledStep) -> StepResult:
            result = compute(executor, step)
            for chunk in step.chunks if self._imposed else ():
                name, text = chunk.request_id, self._imposed[chunk.request_id]
                if name in result.tokens:
                    first = chunk.end - len(result.target_tokens.get(name, ()))
                    result.tokens[name] = text[first]
                    if name in result.target_tokens:
                        result.target_tokens[name] = tuple(text[first + 1 : chunk.end + 1])
            return result

        return imposed


@case("throughput", in_bench=True, quick={"requests": (2,), "tokens": 8, "rounds": 1, "texts": ("greedy", "editing")})
def prediction(
    run: Run,
    load: str = "",
    requests: tuple = (1, 8, 32),
    tokens: int = 96,
    rounds: int = 5,
    texts: tuple = ("greedy", "sampled", "prose", "editing"),
) -> None:
    """Tokens a second with drafts of multi-token prediction beside those without, and accepted drafts by depth."""
    platform.initialize()
    models = Models(Path(load) if load else None, 0.1 if run.is_quick else None)
    if models.is_random:
        run.remark("the model has no layer of multi-token prediction; a random one shows how long this takes, only")
    for text, count in itertools.product(texts, requests):
        arms = models.arms_of(text)
        name = f"{'random layer, ' * models.is_random}{text}, {count} at once"
        params = RequestParams(tokens + 1, temperature=float(text in ("sampled", "prose")), ignore_eos=True)
        served = _texts(models, text, count, tokens)
        run.attempt(name, partial(_compare, run, name, arms, served, params, (count, rounds)), like=f"{count}")


@dataclass
class Models:
    """Copies of a model, with its layer of multi-token prediction or without.

    Args:
        directory: Checkpoint; None for the embedded model.
        draft_cost: See `SpeculationConfig`.
    """

    directory: Path | None
    draft_cost: float | None

    def __post_init__(self) -> None:
        first = load_predicting(self.directory)
        self.is_random, self.tokenizer = first.config.mtp_num_layers is None, first.tokenizer
        self._arms: tuple[str, list[Arm]] = "", []  # of the last text

    def copy(self, *, predicts: bool) -> LoadedModel:
        """Load the model again; with a random layer if it has none."""
        loaded = load_predicting(self.directory, reads_prediction=predicts)
        return with_random_layer(loaded) if predicts and self.is_random else loaded

    def arms_of(self, text: str) -> list[Arm]:
        """Return the engines of a text, kept until another text is asked for; the first one has no drafts."""
        if self._arms[0] != text:
            self._arms = text, list(self._build_arms(text))
        return self._arms[1]

    def _build_arms(self, text: str) -> Iterator[Arm]:
        yield Arm.of("off", self.copy(predicts=False))
        is_fixed = text in ("greedy", "sampled")
        for drafts in range(1, DRAFTS + 1) if is_fixed else ():
            fixed = SpeculationConfig("mtp", drafts, speculative_adaptive=False)
            yield Arm.of(f"K = {drafts}", self.copy(predicts=True), fixed)
        for method in ("mtp",) if is_fixed else METHODS:
            speculation = SpeculationConfig(method, DRAFTS, speculative_draft_cost=self.draft_cost)
            yield Arm.of(f"adaptive {method}", self.copy(predicts=method != "ngram"), speculation)


def _texts(models: Models, text: str, count: int, tokens: int) -> Texts:
    """Return prompts and imposed answers: as many as are served at once, or some one after the other."""
    prompts = [models.tokenizer.tokenize(str(one.content)) for one in example_prompts(RequestParams())]
    longest = LONGEST - tokens - DRAFTS - 2
    chosen = [prompts[(5 * i) % len(prompts)][-longest:] for i in range(max(count, ALONE if count == 1 else 0))]
    return [_edited(prompts[0], i, tokens) if text == "editing" else (one, []) for i, one in enumerate(chosen)]


def _edited(document: Sequence[int], which: int, tokens: int) -> tuple[list[int], list[int]]:
    """Return a part of a document as a prompt, and the same part with some tokens changed as the answer."""
    length = tokens + DRAFTS + 2
    first = 13 * which % max(1, len(document) - length)
    prompt = list(document[first : first + length])
    is_changed = [(i + 7 * which) % CHANGED_EVERY == CHANGED_EVERY - 1 for i in range(length)]
    return prompt, [document[(first + 2 * i) % len(document)] if new else prompt[i] for i, new in enumerate(is_changed)]


def _compare(
    run: Run, name: str, arms: Sequence[Arm], texts: Texts, params: RequestParams, work: tuple[int, int]
) -> None:
    """Let engines take turns in `work`: requests at once, and rounds; report their rates and accepted drafts."""
    count, rounds = work
    before = {arm.name: arm.counts for arm in arms}
    for number in range(rounds + 1):
        for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
            if number <= 1:
                arm.rates.clear()  # the first round warms up
            arm.round(texts, count, params)
    off = arms[0]
    for arm in arms[1:]:
        ratios = [one / other for one, other in zip(arm.rates, off.rates, strict=True)]
        figures: dict[str, Figure] = {
            PLAIN: statistics.median(off.rates),
            DRAFTED: statistics.median(arm.rates),
            RATIO: statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
        pairs = zip(zip(*arm.counts, strict=True), zip(*before[arm.name], strict=True), strict=True)
        for depth, ((drafted, accepted), (drafted_before, accepted_before)) in enumerate(pairs, start=1):
            verified = drafted - drafted_before
            figures[f"accepted at {depth}"] = (accepted - accepted_before) / verified if verified else None
            if depth == 1:
                figures["verified, share of tokens"] = verified / ((rounds + 1) * sum(map(len, off.answers)))
        figures["other answers"] = sum(map(ne, arm.answers, off.answers))
        run.row(f"{arm.name}: {name}", figures)
