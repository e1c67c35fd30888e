"""From a staged step to tokens and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from torch import Tensor

from megatron_ext.errors import ConfigError
from megatron_ext.mcore.staging import PromptScore, StagedStep
from megatron_ext.ops.sampling import sample_tokens
from megatron_ext.scheduling.request import Chunk, Request

TopN = dict[int, float]


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-prob (None if nobody asked) and the best alternatives (empty if nobody asked)."""

    token: int
    log_prob: float | None
    top_n: TopN


@dataclass(frozen=True)
class StepResult:
    """What a forward gave: a token for each chunk that yields one, and scores of prompt tokens."""

    generated: tuple[tuple[Chunk, ScoredToken], ...]
    prompt_scores: tuple[tuple[Request, tuple[ScoredToken, ...]], ...]


class InferenceController(TextGenerationController):
    """`TextGenerationController` that samples every request with a generator of its own.

    Greedy is temperature 0 or top_k 1; top_k and top_p may be combined; log-probs are those of the raw logits.
    """

    def _init_dynamic_sampling_tensors(self) -> None:
        """Nothing to prepare: sampling parameters live on the host, and no memory is pinned."""
        self._get_stop_word_finished_ids_callback = None

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Ids of a text as its tokenizer gives them, with at most one beginning of a document.

        Upstream takes that token away unless it is asked for, and a Llama would read what it was not trained on. A text
        that spells it, as chat templates do, gets no second one from the tokenizer.

        Args:
            prompt: Text.
            add_BOS: Begin with that token though the tokenizer does not.

        Raises:
            ConfigError: `add_BOS`, and the tokenizer has no such token.
        """
        if add_BOS and self.tokenizer.bos is None:
            raise ConfigError("add_BOS is set, but the tokenizer has no token that begins a document; leave it out")
        return self.begin_once(list(self.tokenizer.tokenize(prompt)), add_bos=add_BOS)

    def begin_once(self, tokens: list[int], *, add_bos: bool = False) -> list[int]:
        """The tokens with one beginning of a document, if they have any or it is to be added."""
        bos = self.tokenizer.bos
        spelled = next((i for i, token in enumerate(tokens) if token != bos), len(tokens))
        return [bos] * (add_bos or spelled > 0) + tokens[spelled:]

    def dummy_forward(self) -> None:
        """A forward of one token that touches no request (expert parallelism keeps idle ranks busy with it)."""
        self.inference_wrapped_model.dummy_forward()

    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool = False) -> StepResult | None:
        """Compute the context's staged step; None if nothing is staged. Never gives way to other tasks within it."""
        context = self.inference_wrapped_model.inference_context
        if context.step is None:
            return None
        with torch.inference_mode():
            input_ids, position_ids = context.current_input_and_position_ids()
            logits = self.inference_wrapped_model.run_one_forward_step(
                {"tokens": input_ids, "position_ids": position_ids, "attention_mask": None}
            )
            return choose_tokens(logits[0], context.step)


def choose_tokens(logits: Tensor, step: StagedStep) -> StepResult:
    """Sample and score. Results reach the host in one read-back per kind, after everything is enqueued.

    Args:
        logits: [n, V], rows as in `step.logit_tokens`.
    """
    tokens = _sample(logits, step)  # [m]
    score = _Scorer(logits)
    sampled_requests = [chunk.request for chunk in step.sampling_chunks]
    generated = score(list(step.sample_rows), tokens, sampled_requests)
    prompt = [_score_prompt(score, part) for part in step.prompt_scores]
    return StepResult(
        generated=tuple(zip(step.sampling_chunks, generated, strict=True)),
        prompt_scores=tuple(prompt),
    )


def _score_prompt(score: _Scorer, part: PromptScore) -> tuple[Request, tuple[ScoredToken, ...]]:
    rows = list(range(part.rows.start, part.rows.stop))
    targets = torch.tensor(part.targets, device=score.device)
    request = part.chunk.request
    return request, tuple(score(rows, targets, [request] * len(rows)))


def _sample(logits: Tensor, step: StagedStep) -> Tensor:
    """The next token of every sampling chunk: [m]."""
    rows = torch.tensor(step.sample_rows, dtype=torch.int64).to(logits.device, non_blocking=True)
    candidates = logits[rows]
    _forbid_ends(candidates, [chunk.request for chunk in step.sampling_chunks])
    tokens = candidates.argmax(-1)
    drawn = [i for i, chunk in enumerate(step.sampling_chunks) if not chunk.request.params.is_greedy]
    if not drawn:
        return tokens
    requests = [step.sampling_chunks[i].request for i in drawn]
    index = torch.tensor(drawn).to(logits.device, non_blocking=True)
    columns = (
        [request.params.temperature for request in requests],
        [request.params.top_k for request in requests],
        [request.params.top_p for request in requests],
        [request.draw() for request in requests],
    )
    temperature, top_k, top_p, uniform = torch.tensor(columns, dtype=torch.float64).to(logits.device)
    return tokens.index_copy(0, index, sample_tokens(candidates[index], temperature, top_k.long(), top_p, uniform))


def _forbid_ends(candidates: Tensor, requests: Sequence[Request]) -> None:
    """Rule the termination token out for requests that have fewer tokens than they must have: [m, V], in place."""
    early = [(i, r.termination_id) for i, r in enumerate(requests) if not r.may_stop and r.termination_id is not None]
    possible = [(i, token) for i, token in early if 0 <= token < candidates.shape[1]]
    if possible:
        places = torch.tensor(possible).to(candidates.device, non_blocking=True)
        candidates[places[:, 0], places[:, 1]] = -torch.inf


class _Scorer:
    """Log-probs of chosen tokens and of the best ones, for the rows whose requests ask."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.device = logits.device

    def __call__(self, rows: Sequence[int], tokens: Tensor, requests: Sequence[Request]) -> list[ScoredToken]:
        """Rows [k] of the logits, tokens [k], the request of each row -> k scored tokens."""
        ids = tokens.tolist()
        asked = [i for i, request in enumerate(requests) if request.params.return_log_probs]
        if not asked:
            return [ScoredToken(token, None, {}) for token in ids]
        log_probs = self._logits[[rows[i] for i in asked]].float().log_softmax(-1)
        chosen = log_probs.gather(1, tokens[asked][:, None])[:, 0].tolist()
        best = self._top_n(log_probs, [requests[i].params.top_n_logprobs for i in asked])
        scored = dict(zip(asked, zip(chosen, best, strict=True), strict=True))
        return [ScoredToken(token, *scored.get(i, (None, {}))) for i, token in enumerate(ids)]

    @staticmethod
    def _top_n(log_probs: Tensor, counts: Sequence[int]) -> list[TopN]:
        if not any(counts):
            return [{} for _ in counts]
        values, ids = log_probs.topk(min(max(counts), log_probs.shape[-1]), dim=-1)
        table = zip(ids.tolist(), values.tolist(), counts, strict=True)
        return [dict(zip(row_ids[:n], row_values[:n], strict=True)) for row_ids, row_values, n in table]
