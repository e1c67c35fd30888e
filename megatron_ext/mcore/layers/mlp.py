"""MLP of a layer, with an in-place activation at inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from megatron_ext.mcore.layers.layer_config import with_biases
from megatron_ext.mcore.layers.linear import ColumnLinear, RowLinear
from megatron_ext.mcore.layers.norms import OutputNorm
from megatron_ext.ops.activation import gated_silu, squared_relu_


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2; upstream uses `torch.compile`, which takes seconds per new shape and needs a compiler."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x); upstream's is compiled, which takes seconds per new shape."""
    return x * torch.sigmoid(1.702 * x)


class ScaledSilu:
    """SiLU of the input times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Return silu(x * factor), [...] -> [...]."""
        return F.silu(x * self.factor)


# Activation -> its in-place version.
_IN_PLACE: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    squared_relu: squared_relu_,
    F.silu: lambda x: F.silu(x, inplace=True),
}


def activate_in_place(config: TransformerConfig, inner: Tensor) -> Tensor:
    """Apply the activation of an MLP and overwrite `inner` [..., f]; [..., 2 * f], gates first, if gated."""
    function = config.activation_func
    activate = _IN_PLACE.get(function, function)
    if not config.gated_linear_unit:
        return activate(inner)
    if function is F.silu:
        return gated_silu(inner)
    if isinstance(function, ScaledSilu):
        return gated_silu(inner, function.factor)
    gate, up = inner.chunk(2, dim=-1)
    return function(gate).mul_(up)


class PlainMLP(MLP):
    """Upstream's MLP with its own inference forward. Parameters, names and training are upstream's.

    Layer specs use the class itself: upstream warns about specs of classes that it does not know.
    """

    linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
        **options: object,
    ) -> None:
        config = with_biases(config, "add_mlp_bias")
        group = None if pg_collection is None else pg_collection.tp
        options.pop("is_mtp_layer", None)  # from newer versions' layers; no MLP of upstream takes it
        options = {"ffn_hidden_size": config.ffn_hidden_size, "tp_group": group, **options}
        super().__init__(config, self.linears, **options)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute [s, b, h] -> [s, b, h] and a bias, as upstream."""
        if not torch.is_inference_mode_enabled() or per_token_scale is not None or not self._is_plain():
            return super().forward(hidden_states, per_token_scale, **options)
        inner, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            inner.add_(bias)
        return self.linear_fc2(activate_in_place(self.config, inner))

    def _is_plain(self) -> bool:
        config = self.config
        is_clamped = config.activation_func_clamp_value is not None or config.glu_linear_offset != 0.0
        return not (config.use_te_activation_func or config.bias_activation_fusion or is_clamped)


class NormedMLP(PlainMLP):
    """`PlainMLP` with a norm of its output and none of its input."""

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection | None = None, **options: object
    ) -> None:
        super().__init__(config, pg_collection=pg_collection, **options)
        self.output_norm = OutputNorm(config)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute as upstream and normalize; return None as bias."""
        return self.output_norm(*super().forward(hidden_states, per_token_scale, **options)), None
