"""Evaluation of the embedded model on held-out text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.embedded_model.corpus import held_out_documents
from megatron_ext.errors import ConfigError
from megatron_ext.mcore.layers.hybrid_model import HybridModel
from megatron_ext.text.tokenizer import Tokenizer

EVALUATION_LENGTH = 512  # tokens
EVALUATION_BATCH = 8  # windows


def encode_documents(texts: Iterable[str], tokenize: Callable[[str], list[int]], end_of_document: int) -> Tensor:
    """Return all texts in one row [n] int64, each followed by the end-of-document token."""
    return torch.tensor([token for text in texts for token in (*tokenize(text), end_of_document)])


def held_out_tokens(tokenizer: Tokenizer) -> Tensor:
    """Return the held-out split [n] int64 (documents only, no conversations)."""
    texts = (document.text for document in held_out_documents())
    assert tokenizer.eod is not None, "documents end with a token of their own"
    return encode_documents(texts, tokenizer.tokenize, tokenizer.eod)


def unigram_entropy(tokens: Tensor) -> float:
    """Return the nats per token of a unigram model fitted on these tokens; no unigram model has fewer on them."""
    total = len(tokens)
    return -sum(count / total * math.log(count / total) for count in Counter(tokens.tolist()).values())


@torch.no_grad()
def language_model_loss(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, zero_states_every: int | None = None
) -> float:
    """Return the mean negative log-likelihood, nats per token, of windows that start without any context.

    Args:
        model: Maps tokens and positions [b, s] to logits [b, s, V].
        inputs: [n, s] int64.
        targets: [n, s] int64, the token after each input.
        zero_states_every: Cut the recurrent layers' sequences at multiples of this many tokens, so that
            their states start from zero there. Attention still sees the whole window.

    Raises:
        ConfigError: The windows' length is not a multiple of `zero_states_every`.
    """
    length = inputs.shape[1]
    cut_every = zero_states_every or length
    if length % cut_every:
        raise ConfigError(f"windows of {length} tokens are no multiple of {cut_every}; give a divisor")
    was_training, total = model.training, 0.0
    model.eval()
    with _recurrent_layers_cut(model, length // cut_every):
        for batch in torch.arange(len(inputs)).split(EVALUATION_BATCH):
            logits = model(inputs[batch], positions(inputs[batch]), None)
            total += F.cross_entropy(logits.float().flatten(0, 1), targets[batch].flatten(), reduction="sum").item()
    model.train(was_training)
    return total / targets.numel()


def both_logits(model: HybridModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of the same tokens, [b, s - 1, V] each: the trunk's after token t + 1 and the head's after t."""
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    with torch.no_grad():
        hidden = model.decoder(model.embedding(tokens, positions(tokens)), None)
        trunk, _ = model.output_layer(hidden[1:], weight=weight)
    assert model.mtp is not None
    (states,) = model.mtp(tokens, hidden, model.embedding, 1)
    head, _ = model.output_layer(states, weight=weight)
    return trunk.transpose(0, 1), head.transpose(0, 1)


def windows(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next tokens, each [n, length], of consecutive windows that do not overlap.

    Raises:
        ConfigError: Fewer tokens than one window.
    """
    count = (len(tokens) - 1) // length
    if count == 0:
        raise ConfigError(f"{len(tokens)} tokens do not fill one window of {length}; give a shorter length")
    used = count * length
    return tokens[:used].unflatten(0, (count, length)), tokens[1 : used + 1].unflatten(0, (count, length))


def positions(tokens: Tensor) -> Tensor:
    """Position of each token of [b, s] in its row."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


@contextmanager
def _recurrent_layers_cut(model: nn.Module, pieces: int) -> Iterator[None]:
    """Hand every recurrent mixer its sequence [s, b, h] as `pieces` independent ones, each from zero states."""
    handles = []
    layers: Iterable[nn.Module] = model.get_submodule("decoder.layers").children() if pieces > 1 else ()
    for layer in layers:
        if mixer := getattr(layer, "mixer", None):
            handles.append(mixer.register_forward_pre_hook(lambda _, args: (_cut(args[0], pieces), *args[1:])))
            handles.append(mixer.register_forward_hook(lambda _, __, out: (_join(out[0], pieces), *out[1:])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(hidden: Tensor, pieces: int) -> Tensor:
    """[s, b, h] -> [s / pieces, pieces * b, h]."""
    return hidden.unflatten(0, (pieces, -1)).transpose(0, 1).flatten(1, 2)


def _join(hidden: Tensor, pieces: int) -> Tensor:
    """Undo `_cut`."""
    return hidden.unflatten(1, (pieces, -1)).transpose(0, 1).flatten(0, 1)
