"""Inference controller: compute a staged step, sample its tokens and score them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.engine.error_isolation import describe
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.ops import backend_selection
from megatron_ext.ops.backends import preferring
from megatron_ext.ops.sampling import sample_tokens, sampling_batch
from megatron_ext.ops.step_metadata import to_device
from megatron_ext.runner.logits_processing import process_logits
from megatron_ext.runner.model_input import ModelInput, PromptScore, SampledTokens, SamplingRow
from megatron_ext.runner.out_of_memory import is_out_of_memory
from megatron_ext.runner.scoring import score_rows
from megatron_ext.scheduling.step import Sampling
from megatron_ext.speculation.drafter import Drafter
from megatron_ext.text.grammars import Grammars
from megatron_ext.text.prompt_tokenization import begin_once, tokenize_prompt
from megatron_ext.text.vocabulary import Vocabulary


@torch.inference_mode()
def compute_idle_token(model: MegatronModule) -> None:
    """Compute one dummy token through this stage's MoE layers, so that other replicas' expert exchanges complete.

    Only MoE layers exchange data with other replicas, so the token goes through no other layer and needs no input from
    an earlier pipeline stage. Upstream's idle forward goes through all layers, for which a later stage has no input,
    and with CUDA graphs it resets the context and with it the cache. No context is used here, so nothing in the pools
    changes. All tensor-parallel ranks of an idle stage do this once a step.

    Args:
        model: Model of this rank, in eval mode.
    """
    parameter = next(model.parameters())
    token = torch.zeros(1, 1, model.config.hidden_size, dtype=parameter.dtype, device=parameter.device)
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer(token)


class InferenceController(TextGenerationController):
    """`TextGenerationController` that samples every request with a generator of its own.

    Greedy is temperature 0 or top_k 1; top_k and top_p may be combined; log-probs are those of the raw logits, before
    penalties and the like (`runner.logits_processing`).

    Args:
        wrapper: Inference wrapper of the model.
        tokenizer: See `megatron_ext.text.tokenizer.Tokenizer`.
        options: Upstream's options.

    Attributes:
        vocabulary_size: V, the width of the logits.
        drafter: Proposes draft tokens for engines around the model; None disables drafts.
        operators: Backend name of the operators, or None; see `ops.backend_selection`.
    """

    def __init__(self, wrapper: AbstractModelInferenceWrapper, tokenizer: object, **options: object) -> None:
        super().__init__(wrapper, tokenizer, **options)
        self.vocabulary_size = size = wrapper.inference_wrapper_config.padded_vocab_size
        self.vocabulary = Vocabulary(tokenizer, size)
        self.drafter: Drafter | None = None
        self.operators: str | None = None
        self.grammars = Grammars(self.tokenizer, size)

    def _init_dynamic_sampling_tensors(self) -> None:
        """Prepare nothing: sampling parameters live on the host, and no memory is pinned."""
        self._get_stop_word_finished_ids_callback = None

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of a text; see `text.prompt_tokenization.tokenize_prompt`.

        Upstream strips the BOS token unless it is requested, and a Llama would read a prompt unlike its training data.
        """
        return tokenize_prompt(self.tokenizer, prompt, add_bos=add_BOS)

    def begin_once(self, tokens: list[int]) -> list[int]:
        """Return the tokens with repeated leading BOS tokens reduced to one."""
        return begin_once(tokens, self.tokenizer.bos)

    def idle_step(self) -> None:
        """Run a step of a replica without requests, whose experts serve other replicas too."""
        if self.inference_wrapped_model.model.config.expert_model_parallel_size > 1:
            self.dummy_forward()

    def dummy_forward(self) -> None:
        """Run `compute_idle_token` under upstream's name: the step of a rank without requests."""
        compute_idle_token(unwrap_model(self.inference_wrapped_model.model))

    async def async_generate_output_tokens_dynamic_batch(self, skip_bookkeeping: bool = False) -> StepResult | None:
        """Run `compute_step` under upstream's name; None if nothing is staged."""
        return None if self.inference_wrapped_model.inference_context.step is None else self.compute_step()

    def compute_step(self) -> StepResult | None:
        """Compute the context's staged step, sample and score; None on stages before the last one.

        Tensor-parallel ranks get the same logits each, and score together.
        """
        context = self.inference_wrapped_model.inference_context
        with torch.inference_mode(), preferring(self.operators):
            logits = self.forward()
            if logits is None:
                return None
            is_alone = self.inference_wrapped_model.tp_size == 1
            return choose_tokens(logits[0], context.step, self._scored_logits, is_alone=is_alone)

    def forward(self) -> Tensor | None:
        """Run the model's forward of the staged step: logits [1, m, V]; None on stages before the last one."""
        input_ids, position_ids = self.inference_wrapped_model.inference_context.current_input_and_position_ids()
        with preferring(self.operators):
            logits: Tensor | None = self.inference_wrapped_model.run_one_forward_step(
                {"tokens": input_ids, "position_ids": position_ids, "attention_mask": None}
            )
        return logits

    def weight_addresses(self) -> tuple[int, ...]:
        """Return the memory addresses of the model's parameters and buffers."""
        model = self.inference_wrapped_model.model
        return tuple(one.data_ptr() for tensors in (model.parameters(), model.buffers()) for one in tensors)

    def chosen_operators(self) -> dict[str, tuple[str, ...]]:
        """Return the chosen operators of each backend; see `ops.backend_selection.chosen`."""
        parameter = next(self.inference_wrapped_model.model.parameters())
        return backend_selection.chosen(self.operators or backend_selection.AUTO, parameter.detach())

    def _scored_logits(self, rows: slice) -> Tensor:
        """Return logits of some of the step's scored tokens, equal to the model's forward: [k, h] -> [rows, V]."""
        model = unwrap_model(self.inference_wrapped_model.model)
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        states = self.inference_wrapped_model.inference_context.scored_states[rows]
        logits, _ = model.output_layer(states[:, None], weight=weight, runtime_gather_output=True)
        return logits[:, 0]


def choose_tokens(
    logits: Tensor,
    step: ModelInput,
    scored_logits: Callable[[slice], Tensor],
    *,
    is_alone: bool = True,
) -> StepResult:
    """Sample and score. A scoring that runs out of memory fails only the request that asked for the scores.

    Args:
        logits: [m, V], rows as in `step.sample_tokens`.
        step: The computed step.
        scored_logits: Rows of `step.score_tokens` -> their logits, [rows, V].
        is_alone: Whether no other rank takes part in scoring. Another rank would wait for a scoring that this rank has
            given up, so with several ranks running out of memory fails the step.
    """
    failures: dict[int, str] = {}
    tokens = _choose(logits, step.sampling)  # [m]
    generated = _score_generated(logits, tokens, step.sampling, failures)
    prompt = {}
    for part in step.prompt_scores:
        with _out_of_memory_fails(part.request_id, failures) if is_alone else contextlib.nullcontext():
            prompt[part.request_id] = _score_prompt(scored_logits, part, logits)
    return _by_request(step.sampling, tokens, generated, prompt, failures)


def _by_request(
    rows: Sequence[SamplingRow],
    tokens: Tensor,
    generated: Mapping[int, Score],
    prompt: dict[int, tuple[Score, ...]],
    failures: dict[int, str],
) -> StepResult:
    """Group the results of a step's rows by request; a request with drafts has several consecutive rows."""
    drawn = tokens.tolist()
    drafted = [i for i, row in enumerate(rows) if row.drafts]
    first = [i for i, row in enumerate(rows) if not row.drafts] if drafted else range(len(rows))
    names = [rows[i].request_id for i in first]
    result = StepResult(
        tokens={name: drawn[i] for name, i in zip(names, first, strict=True)},
        generated={rows[i].request_id: score for i, score in generated.items() if not rows[i].drafts},
        prompt=prompt,
        failures=failures,
        sampled=SampledTokens(tokens, dict(zip(names, first, strict=True))),
    )
    for i in drafted:
        name = rows[i].request_id
        result.target_tokens[name] = (*result.target_tokens.get(name, ()), drawn[i])
        if i in generated:
            result.target_scores[name] = (*result.target_scores.get(name, ()), generated[i])
    return result


def _score_prompt(scored_logits: Callable[[slice], Tensor], part: PromptScore, logits: Tensor) -> tuple[Score, ...]:
    first, count = part.rows.start, len(part.targets)
    targets = to_device(torch.tensor(part.targets), logits.device)

    def logits_of(rows: slice) -> Tensor:
        return scored_logits(slice(first + rows.start, first + min(rows.stop, count)))

    return score_rows(logits_of, logits.shape[-1], targets, [part.top_n] * count)


def _score_generated(
    logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow], failures: dict[int, str]
) -> dict[int, Score]:
    """Return scores of sampled tokens by row, in one batch; row by row if that runs out of memory."""
    asked = [i for i, row in enumerate(rows) if row.sampling.top_n is not None]
    if not asked:
        return {}
    try:
        scores = _score_sampled(logits, tokens, rows, asked)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        return dict(zip(asked, scores, strict=True))
    found = {}
    for i in asked:
        with _out_of_memory_fails(rows[i].request_id, failures):
            (found[i],) = _score_sampled(logits, tokens, rows, [i])
    return found


def _score_sampled(logits: Tensor, tokens: Tensor, rows: Sequence[SamplingRow], asked: list[int]) -> tuple[Score, ...]:
    index = to_device(torch.tensor(asked), logits.device)

    def logits_of(part: slice) -> Tensor:
        return logits.index_select(0, index[part])

    top_n = [rows[i].sampling.top_n or 0 for i in asked]
    return score_rows(logits_of, logits.shape[-1], tokens.index_select(0, index).clamp(min=0), top_n)


@contextlib.contextmanager
def _out_of_memory_fails(request_id: int, failures: dict[int, str]) -> Iterator[None]:
    """Record an out-of-memory error inside this context as a failure of the request."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failures[request_id] = f"no memory for its log-probs: {describe(error)}"


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the next token of every sampling row: [m]. Only rows with logits options are processed and copied."""
    asking = [i for i, row in enumerate(rows) if row.sampling.logits_options is not None]
    if not asking:
        return _sample(logits, rows)
    index = to_device(torch.tensor(asking), logits.device)
    chosen, values = [rows[i] for i in asking], logits.index_select(0, index).float()
    process_logits(values, chosen)
    tokens = _sample(values, chosen)
    return tokens if len(asking) == len(rows) else _sample(logits, rows).index_copy(0, index, tokens)


def _sample(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return the next token of every sampling row by temperature, top_k and top_p: [m]. The logits end up unchanged."""
    drawn = [row.sampling for row in rows if row.sampling.uniform is not None]
    with _forbidden(logits, [row.sampling.forbidden for row in rows]):
        if not drawn:
            return _best(logits)
        if len(drawn) == len(rows):
            return _draw(logits, drawn)
        index = torch.tensor([i for i, row in enumerate(rows) if row.sampling.uniform is not None])
        index = to_device(index, logits.device)
        return _best(logits).index_copy(0, index, _draw(logits.index_select(0, index), drawn))


def _best(logits: Tensor) -> Tensor:
    """Return the first maximum of each row's logits; `argmax` is equal but several times slower on a CPU."""
    return logits.max(-1).indices


def _draw(logits: Tensor, metadata: Sequence[Sampling]) -> Tensor:
    batch = sampling_batch(
        [one.temperature for one in metadata],
        [one.top_k for one in metadata],
        [one.top_p for one in metadata],
        [one.uniform for one in metadata if one.uniform is not None],
    )
    return sample_tokens(logits, batch)


@contextlib.contextmanager
def _forbidden(logits: Tensor, tokens: Sequence[Sequence[int]]) -> Iterator[None]:
    """Mask the forbidden tokens of each row inside this context: [m, V]. The logits are restored for scoring."""
    possible = [(i, token) for i, row in enumerate(tokens) for token in row if 0 <= token < logits.shape[1]]
    if not possible:
        yield
        return
    places = tuple(to_device(torch.tensor(possible), logits.device).unbind(1))
    before = logits[places]
    logits[places] = -torch.inf
    try:
        yield
    finally:
        logits[places] = before
