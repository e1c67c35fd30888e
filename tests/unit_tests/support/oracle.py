"""The truth: the same model without any engine, everything computed again for every token.

The states of recurrent layers come from a recurrence of our own, one token at a time, over the inputs that the layers
of that plain forward received: no code is shared with the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.mamba import MambaModel
from torch import Tensor

from megatron_ext.config import ModelConfig
from megatron_ext.mixers.gated_delta_net import GatedDeltaNetMixer
from megatron_ext.mixers.mamba1 import Mamba1Mixer
from megatron_ext.mixers.mamba2 import Mamba2Mixer
from megatron_ext.mixers.mixer import RecurrentMixer
from megatron_ext.mixers.short_conv import ShortConvMixer
from tests.unit_tests.support.mamba1 import recur_mamba1
from tests.unit_tests.support.models import build_slow_decay


@dataclass(frozen=True)
class Expected:
    """Expected outputs of a greedy request.

    Attributes:
        tokens: Generated tokens.
        logits: [n, V], row i yields tokens[i].
        prompt_log_probs: [P - 1], entry i scores prompt token i + 1.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    prompt_log_probs: Tensor

    @property
    def log_probs(self) -> Tensor:
        """[n] log-probs of the generated tokens."""
        return self.logits.log_softmax(-1).gather(1, torch.tensor(self.tokens)[:, None])[:, 0]


class Oracle:
    """Plain recomputation of one model, on its device; what it computed once it remembers, on the host."""

    def __init__(self, model: MambaModel) -> None:
        self.model = model
        self._mixers = [module for module in model.modules() if isinstance(module, RecurrentMixer)]
        self._logits: dict[tuple[int, ...], Tensor] = {}
        self._states: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        self._inputs: tuple[tuple[int, ...], list[tuple[RecurrentMixer, Tensor]]] = ((), [])  # of the last forward

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V] of one sequence from its beginning."""
        key = tuple(tokens)
        if key not in self._logits:
            self._compute(key)
        return self._logits[key]

    @torch.inference_mode()
    def _compute(self, tokens: tuple[int, ...]) -> None:
        """Keep the logits of a sequence, and what its recurrent layers received, [T, h] each."""
        inputs: list[tuple[RecurrentMixer, Tensor]] = []
        hooks = [
            module.register_forward_pre_hook(lambda module, args: inputs.append((module, args[0][:, 0])))
            for module in self._mixers
        ]
        try:
            self._logits[tokens] = self._forward(tokens)[0].clone().cpu()
        finally:
            for hook in hooks:
                hook.remove()
        self._inputs = tokens, inputs

    def _forward(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=next(self.model.parameters()).device)
        found: Tensor = self.model(ids, torch.arange(len(tokens), device=ids.device)[None], None)
        return found

    def greedy(self, prompt: Sequence[int], count: int, guess: Sequence[int] = ()) -> Expected:
        """Generate `count` tokens, each by a full forward over everything before it.

        Args:
            guess: Tokens that may be the generated ones. If each is the best after those before it, which one forward
                shows, they are the result.
        """
        if len(guess) == count > 1:
            logits = self.logits([*prompt, *guess[:-1]])
            rows = logits[len(prompt) - 1 :]
            if rows.argmax(-1).tolist() == list(guess):
                return Expected(tuple(guess), rows, self.prompt_log_probs(prompt, logits))
        tokens, rows = list(prompt), []
        for _ in range(count):
            rows.append(self.logits(tokens)[-1])
            tokens.append(int(rows[-1].argmax()))
        return Expected(tuple(tokens[len(prompt) :]), torch.stack(rows), self.prompt_log_probs(prompt))

    def prompt_log_probs(self, prompt: Sequence[int], logits: Tensor | None = None) -> Tensor:
        """[P - 1] log-probs of the prompt's own tokens after the first; `logits` are of a text that it begins."""
        logits = self.logits(prompt) if logits is None else logits
        scores = logits[: len(prompt) - 1].log_softmax(-1)
        return scores.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Convolution state [Cn, K-1] and SSM state [H, P, N] of every recurrent layer after all of `tokens`."""
        key = tuple(tokens)
        if key not in self._states:
            if self._inputs[0][: len(key)] != key:
                self._compute(key)
            found = [RECURRENCES[type(mixer)](mixer, hidden[: len(key)]) for mixer, hidden in self._inputs[1]]
            self._states[key] = [(conv.cpu(), ssm.cpu()) for conv, ssm in found]
        return self._states[key]


def oracles_of(configs: Mapping[str, ModelConfig]) -> Callable[[str], Oracle]:
    """Make a function from the kind of a model to its oracle, which is built once and holds the model."""
    return functools.cache(lambda kind: Oracle(build_slow_decay(configs[kind])))


def recur(mixer: Mamba2Mixer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Final states of one layer for the inputs `hidden` [T, h], one token at a time, in fp64.

    Mamba-2 with scalar A per head: state <- exp(dt * A) * state + dt * x (outer) B; the convolution state is the last
    K - 1 columns of [x | B | C] before the convolution, oldest first, zeros before the sequence.
    """
    heads, head_size, groups, state_size = mixer.nheads_local, mixer.headdim, mixer.ngroups_local, mixer.d_state
    inner, window = heads * head_size, mixer.d_conv
    projected = hidden.double() @ mixer.in_proj.weight.double().T
    if mixer.multipliers is not None:
        projected = projected * mixer.multipliers.double()
    columns = projected[:, inner : inner + mixer.conv_dim]  # [T, Cn]
    dt = F.softplus(projected[:, -heads:] + mixer.dt_bias.double())  # [T, H]
    decay = torch.exp(-torch.exp(mixer.A_log.double()) * dt)
    weight, bias = mixer.conv1d.weight.double()[:, 0], mixer.conv1d.bias.double()
    padded = torch.cat([columns.new_zeros(window - 1, mixer.conv_dim), columns])
    state = columns.new_zeros(heads, head_size, state_size)
    for t in range(len(hidden)):
        mixed = F.silu((padded[t : t + window].T * weight).sum(-1) + bias)  # [Cn]
        x = mixed[:inner].view(heads, head_size)
        b = mixed[inner : inner + groups * state_size].view(groups, state_size).repeat_interleave(heads // groups, 0)
        state = decay[t, :, None, None] * state + (dt[t, :, None] * x)[:, :, None] * b[:, None, :]
    return padded[-(window - 1) :].T.float(), state.float()


def recur_delta_net(mixer: GatedDeltaNetMixer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Recurrence of a gated delta net: a key's recalled value moves to the token's value, after a decay per head."""
    keys, values = mixer.key_heads_local, mixer.value_heads_local
    projected = hidden.double() @ mixer.in_proj.weight.double().T
    columns, beta, alpha = projected[:, : mixer.conv_dim], projected[:, -2 * values : -values], projected[:, -values:]
    decay = torch.exp(-torch.exp(mixer.A_log.double()) * F.softplus(alpha + mixer.dt_bias.double()))  # [T, H]
    padded = torch.cat([columns.new_zeros(mixer.d_conv - 1, mixer.conv_dim), columns])
    state = columns.new_zeros(values, mixer.key_head_dim, mixer.value_head_dim)
    for t in range(len(hidden)):
        window = padded[t : t + mixer.d_conv].T
        mixed = F.silu((window * mixer.conv1d.weight.double()[:, 0]).sum(-1))  # [Cn]
        key, value = mixed[mixer.qk_dim_local : 2 * mixer.qk_dim_local], mixed[2 * mixer.qk_dim_local :]
        key = key.view(keys, -1).repeat_interleave(values // keys, 0)
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        state = decay[t, :, None, None] * state
        error = value.view(values, -1) - torch.einsum("hkv,hk->hv", state, key)
        state = state + beta[t].sigmoid()[:, None, None] * key[:, :, None] * error[:, None, :]
    return padded[-(mixer.d_conv - 1) :].T.float(), state.float()


def recur_short_conv(mixer: ShortConvMixer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The last K - 1 columns of B * x, and nothing."""
    b, _, x = (hidden.double() @ mixer.in_proj.weight.double().T).chunk(3, dim=-1)
    padded = torch.cat([x.new_zeros(mixer.d_conv - 1, x.shape[1]), b * x])
    return padded[-(mixer.d_conv - 1) :].T.float(), torch.zeros(0)


RECURRENCES = {
    Mamba2Mixer: recur,
    Mamba1Mixer: recur_mamba1,
    GatedDeltaNetMixer: recur_delta_net,
    ShortConvMixer: recur_short_conv,
}
