"""Fields of MLPs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.checks import require
from megatron_ext.config.layers.stack import StackFields


@dataclass(frozen=True)
class MlpFields(StackFields):
    """Of an MLP; biases are those of attention and Mamba layers too."""

    ffn_hidden_size: int | None = None  # default: 4 * hidden_size
    squared_relu: bool = False
    swiglu: bool = False
    disable_bias_linear: bool = True
    add_mlp_bias: bool = False  # of MLPs (-), where linear layers have none otherwise

    @property
    def ffn_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size


def check_mlp(config: MlpFields) -> None:
    """See that there is one activation."""
    require(
        not (config.squared_relu and config.swiglu),
        "--squared-relu and --swiglu contradict each other; give one of them",
    )
