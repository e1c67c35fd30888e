"""What is to be said of a kind of recurrent layers outside its mixer and its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ext.config.model import ModelConfig


@dataclass(frozen=True)
class RecurrentKind:
    """A kind of recurrent layers. The shapes of its states are its mixer's to say.

    Attributes:
        name: Value of `--recurrent-layer`.
        mixer: Module and name of its mixer's class; imported by whoever builds layers.
        stack_spec: Name in `mcore.layer_specs` of the stack whose recurrent layers are of this kind.
        check: Raises a `ConfigError` if its fields make no sense for layers of this kind.
        check_values: The same of values that make no sense for any model, looked at in every one.
        chunk_size: Tokens that its scan takes together; at inference at most that, see `memory.budget`.
        parameter_count: Parameters in the matrices and the convolution of one layer.
        state_size: Numbers in the recurrence's state of one layer and sequence, without the convolution's window.
        mixer_params: What its mixer is told that megatron-core's configuration has no place for.
        core_fields: Its fields in megatron-core's configuration.
        shared: What tensor-parallel ranks share evenly, how an error calls it to how many there are.
        layout: Fields and properties of `ModelConfig` that decide how its stored weights are cut up, beside
            those of every model, to how an error calls them: a flag, or the name of a field without one.
    """

    name: str
    mixer: tuple[str, str]
    stack_spec: str
    check: Callable[[ModelConfig], None]
    chunk_size: Callable[[ModelConfig], int]
    parameter_count: Callable[[ModelConfig], int]
    state_size: Callable[[ModelConfig], int]
    mixer_params: Callable[[ModelConfig], Mapping[str, object]]
    core_fields: Callable[[ModelConfig], Mapping[str, object]]
    shared: Callable[[ModelConfig], dict[str, int]]
    layout: Mapping[str, str]
    check_values: Callable[[ModelConfig], None] | None = None
