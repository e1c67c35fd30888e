"""Fields of MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.layers.stack import StackFields


@dataclass(frozen=True)
class MlpFields(StackFields):
    """Fields of MLPs; `disable_bias_linear` also applies to attention and Mamba layers."""

    ffn_hidden_size: int | None = None  # default: 4 * hidden_size
    squared_relu: bool = False
    swiglu: bool = False
    disable_bias_linear: bool = True
    add_mlp_bias: bool = False  # for MLPs (-), if other linear layers have no bias

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size


def check_mlp(config: MlpFields) -> None:
    """Require at most one activation flag."""
    require(
        not (config.squared_relu and config.swiglu),
        "--squared-relu and --swiglu contradict each other; give one of them",
    )
