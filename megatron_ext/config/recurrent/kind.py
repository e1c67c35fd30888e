"""Record of a kind of recurrent layers: everything outside its mixer and its operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_ext.config.model_fields import ModelFields


@dataclass(frozen=True)
class RecurrentKind:
    """Kind of recurrent layers. The mixer defines the shapes of the states.

    Attributes:
        name: Value of `--recurrent-layer`.
        mixer: Module and class name of the mixer; imported when layers are built.
        stack_spec: Name in `mcore.layer_specs` of the stack whose recurrent layers are of this kind.
        check: Check of a model with layers of this kind; raises a `ConfigError` for inconsistent fields.
        check_values: Check of this kind's fields in every model, for values that are never valid.
        chunk_size: Tokens of a chunk of the scan; at inference the maximum, see `memory.budget`.
        parameter_count: Parameters in the matrices and the convolution of one layer.
        state_size: Numbers in the recurrent state of one layer and sequence, without the convolution's window.
        mixer_params: Mixer parameters that megatron-core's configuration has no field for.
        core_fields: This kind's fields in megatron-core's configuration.
        shared: Counts that tensor-parallel ranks must divide evenly, by their name in error messages.
        layout: Further fields and properties of `ModelFields` that decide how this kind's stored weights are sharded,
            each with its name in error messages: a flag, or the name of a field without one.
    """

    name: str
    mixer: tuple[str, str]
    stack_spec: str
    check: Callable[[ModelFields], None]
    chunk_size: Callable[[ModelFields], int]
    parameter_count: Callable[[ModelFields], int]
    state_size: Callable[[ModelFields], int]
    mixer_params: Callable[[ModelFields], Mapping[str, object]]
    core_fields: Callable[[ModelFields], Mapping[str, object]]
    shared: Callable[[ModelFields], dict[str, int]]
    layout: Mapping[str, str]
    check_values: Callable[[ModelFields], None] | None = None
