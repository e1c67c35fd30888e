"""A world of ranks in one process: a fleet, followers, and what travels between them, pickled.

The "model" is a function of the tokens, so that equal prompts go on alike. Only rank 0 sees more.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from megatron_ext.config import EvictionPolicyName
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Executor
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.engine.structured_output import Job
from megatron_ext.parallel.commands import Batch, RecordingScheduler
from megatron_ext.parallel.driver import Driver
from megatron_ext.parallel.worker import Worker
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep
from megatron_ext.speculation.drafter import Drafter, DraftRequest
from megatron_ext.speculation.proposals import Proposals
from megatron_ext.text.vocabulary import Vocabulary

TOKENS = 3  # of the vocabulary; the last one ends a sequence
EOD = TOKENS - 1


class Letters:
    """A tokenizer of one letter a token; a text with "cab" in it cannot be made."""

    vocab_size = TOKENS

    def detokenize(self, ids: list[int], **_: object) -> str:
        text = "".join("abc"[token] for token in ids)
        if "cab" in text:
            raise ValueError("this text cannot be made")
        return text


def following(token: int, length: int) -> int:
    """Next token of a decode, after a token and `length` tokens in all."""
    return (token + length // 3) % TOKENS


def drawn_behind(chunk: ScheduledChunk) -> list[int]:
    """Draw the token after a chunk, or after its known token and each of its drafts."""
    if not chunk.target_sampling:
        return [following(sum(chunk.token_ids), chunk.end)]
    return [following(token, chunk.start + 1 + i) for i, token in enumerate(chunk.token_ids)]


class Guesses(Drafter):
    """Drafter that is right for a few tokens, then wrong; now and then it raises, or returns invalid drafts."""

    def propose(self, asks: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        return {ask.request_id: self._guess(ask) for ask in asks}

    def _guess(self, ask: DraftRequest) -> tuple[int, ...]:
        token, length = ask.tokens[-1], len(ask.tokens)
        if length % 13 == 0:
            raise LookupError("no idea")
        if length % 11 == 0:
            return (TOKENS,)
        guesses = []
        for i in range(ask.limit):
            token = (following(token, length + i) + (i == length % 4)) % TOKENS
            guesses.append(token)
        return tuple(guesses)

    def accepted(self, request_id: int, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted >= 1

    def forget(self, request_id: int) -> None:
        pass


def mask_after(tokens: Sequence[int]) -> bytes:
    """The mask of the token after these, which says what they were."""
    return bytes([255, *tokens])


class Grammar:
    """A matcher that allows everything, until some sequence of tokens is too much for it."""

    seconds = 0.0

    def __init__(self, tokens: tuple[int, ...] = ()) -> None:
        self._tokens = tokens

    def copy(self) -> Grammar:
        return Grammar(self._tokens)

    def take(self, tokens: Sequence[int]) -> None:
        self._tokens += tuple(tokens)

    def allowed(self, ends: Sequence[int]) -> bytes:
        if len(self._tokens) > 3 and sum(self._tokens) % 5 == 0:
            raise ValueError("too much")
        return mask_after(self._tokens)


class HandThread:
    """Mask jobs, computed when the test calls for them."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> bool:
        return is_enough()

    def run(self, count: int) -> None:
        for job in self._jobs[:count]:
            job.run()
            job.is_done = True
        del self._jobs[:count]


class Model(Executor):
    """Writes down each message, and answers with tokens and scores."""

    def __init__(self) -> None:
        self.steps: list[ScheduledStep | None] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        self.steps.append(pickle.loads(pickle.dumps(step)))
        due = [chunk for chunk in step.chunks if chunk.sampling is not None]
        tokens = {chunk.request_id: drawn_behind(chunk)[0] for chunk in due}
        behind = {chunk.request_id: tuple(drawn_behind(chunk)[1:]) for chunk in due if chunk.target_sampling}
        asked = [chunk for chunk in due if chunk.sampling.top_n is not None]
        generated = {chunk.request_id: Score(-1.0, {}) for chunk in asked}
        more = {chunk.request_id: tuple(Score(-1.0, {}) for _ in chunk.target_sampling) for chunk in asked}
        scored = [chunk for chunk in step.chunks if chunk.scoring is not None]
        prompt = {one.request_id: tuple(Score(-2.0, {}) for _ in one.scoring.targets) for one in scored}
        return StepResult(tokens, generated, prompt, {}, target_tokens=behind, target_scores=more)

    def idle(self) -> None:
        self.steps.append(None)


class Listener(Executor):
    """A follower's executor: it writes down its own message, and of the result gets the tokens."""

    def __init__(self, model: Model) -> None:
        self.steps: list[ScheduledStep | None] = []
        self._model = model  # of its replica, one step ahead

    def execute(self, step: ScheduledStep) -> StepResult:
        self.steps.append(step)
        assert self._model.steps[len(self.steps) - 1] == step, "another message than rank 0's"
        tokens = self._tokens(step)
        return StepResult(tokens, {}, {}, {}, target_tokens=Model().execute(step).target_tokens)

    def _tokens(self, step: ScheduledStep) -> dict[int, int]:
        return Model().execute(step).tokens

    def idle(self) -> None:
        self.steps.append(None)
        assert self._model.steps[len(self.steps) - 1] is None, "rank 0 has something to compute"


class Pools:
    """Stand-in for a worker's pools that records whether they are allocated."""

    is_there = False
    marks = 0

    def mark_new_weights(self) -> None:
        self.marks += 1

    def use_new_weights(self) -> None:
        pass

    def allocate(self) -> None:
        self.is_there = True

    def free(self) -> None:
        self.is_there = False


class World:
    """A fleet of `replicas` engines, and two followers for each."""

    MODEL = Model

    def __init__(self, limits: SchedulerLimits, policy: EvictionPolicyName, slots: int | None, replicas: int) -> None:
        self.make: Callable[[type], Scheduler] = lambda kind: kind(limits, policy, b"model", slots)
        self.sent: list[bytes] = []
        self.start(replicas)
        self.pools = [Pools() for _ in range(2 * replicas)]
        self.followers = [
            Worker(i // 2, self, lambda: self.make(Scheduler), Listener(self.models[i // 2]), pools)
            for i, pools in enumerate(self.pools)
        ]

    def start(self, replicas: int) -> None:
        """A fleet, or one in place of another."""
        vocabulary, self.mask_thread = Vocabulary(Letters(), TOKENS), HandThread()
        input_settings = InputSettings(
            lambda text, _: ["abc".index(letter) for letter in text],
            vocabulary,
            (EOD,),
            1,
            lambda word: [],
            lambda form: Grammar(),
            mask_thread=self.mask_thread,
        )
        self.models = [self.MODEL() for _ in range(replicas)]
        schedulers = [self.make(RecordingScheduler) for _ in self.models]
        proposals = Proposals(Guesses(), vocabulary.has_tokens)
        self.driver = Driver(schedulers, self, heartbeat=1e9)
        parts = list(zip(schedulers, self.models, strict=True))
        self.core = EngineCore(parts, input_settings, proposals=proposals, workers=self.driver)

    def start_anew(self) -> None:
        """Reset the core as `InferenceEngine.reset` does."""
        replicas = len(self.models)
        self.core.cancel()
        self.start(replicas)
        for i, follower in enumerate(self.followers):
            follower._executor = Listener(self.models[i // 2])

    def send(self, batch: Batch) -> None:
        self.sent.append(pickle.dumps(batch))

    def receive(self) -> Batch:
        return pickle.loads(self.sent.pop(0))

    def meet(self) -> None:
        """Wait for nobody: all ranks are in this process."""

    def step(self) -> list:
        """Run one step on all ranks: rank 0 first, the others from the messages sent."""
        step = self.core.compute()
        records = self.core.report(step)
        self.deliver()
        self.core.check()
        for follower in self.followers:
            follower.scheduler.check()
        return records

    def deliver(self) -> None:
        """Let the followers have what was sent."""
        batches, self.sent = self.sent, []
        for follower in self.followers:
            queue = [pickle.loads(batch) for batch in batches]
            for batch in queue:
                follower.obey(batch.of(follower.replica))
                if batch.action is batch.action.STEP:
                    follower.step()
