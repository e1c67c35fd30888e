"""Linear layers whose weight can be replaced by a packed one.

While a layer is packed, its parameter is a placeholder of the same shape: reading it gives NaN, writing in place raises
torch's error (filling with one number works). The original weight comes back, to the bit, when a state dict is made or
loaded, or by `unpack`; the engine packs it again before its next step.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, nn

from megatron_ext.ops.linear.few_rows import linear
from megatron_ext.ops.linear.reference import LinearBackend, PackedWeight

_edits_of = attrgetter("_version")  # torch's own counter of a tensor's in-place edits


class Packable:
    """Mixin of modules with a `weight` [o, i], or None if each call brings it; before the module's class.

    Attributes:
        packed: Packed weight that computes; None if `F.linear` does.
        packed_beside: The parameter that `packed` was made of, in a tuple, if that keeps its values (a tied embedding);
            empty if the packed weight has replaced it.
        packed_edits: Edit count of the parameter when it was packed.
        packed_by: Backend that packed it; None if it is not packed.
    """

    weight: nn.Parameter
    packed: PackedWeight | None = None
    packed_beside: tuple[nn.Parameter, ...] = ()  # in a tuple: a module would register a bare parameter
    packed_edits: int = 0
    packed_by: LinearBackend | None = None
    _is_hooked: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":  # another parameter, which is not packed
            self._forget()
        super().__setattr__(name, value)

    @property
    def is_current(self) -> bool:
        """True if the layer is packed, and its parameter was not written since."""
        if self.packed is None:
            return False
        (parameter,) = self.packed_beside or (self.weight,)
        return _edits_of(parameter) == self.packed_edits

    def product(self, x: Tensor, bias: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Return the product: [..., i] -> [..., o]; the layer is unpacked first where gradients are enabled.

        Args:
            x: Input.
            bias: Added to the product, [o].
            weight: Replaces the layer's own weight.
        """
        if self.packed is not None and torch.is_grad_enabled():
            self.unpack()
        packed = self.packed
        if packed is not None and (weight is None or any(weight is one for one in (self.weight, *self.packed_beside))):
            return packed(x, bias)
        return linear(x, self.weight if weight is None else weight, bias)

    def pack(self, backend: LinearBackend, beside: nn.Parameter | None = None) -> None:
        """Pack the layer's weight, which is given up.

        Args:
            backend: Backend that packs.
            beside: Parameter to pack instead of the layer's own; it keeps its values.
        """
        assert backend.pack is not None, f"{backend.name} packs nothing"
        self.unpack()
        weight = self.weight if beside is None else beside
        packed = backend.pack(weight)
        self.packed_beside, self.packed_edits = () if beside is None else (beside,), _edits_of(weight)
        self.packed, self.packed_by = packed, backend
        if beside is None:
            weight.data = torch.full((1,), torch.nan, dtype=weight.dtype).expand(weight.shape)
            self._unpack_for_state_dicts()

    def unpack(self) -> None:
        """Restore the original weight; nothing happens if the layer is not packed.

        Raises:
            ConfigError: The weight is quantized. It stays so.
        """
        packed = self.packed
        if packed is not None and not self.packed_beside:
            with torch.inference_mode(mode=False), torch.no_grad():
                self.weight.data = packed.dense() if self.is_current else self.weight.clone()  # filled with one number
        self._forget()

    def make_writable(self) -> None:
        """Give a packed layer's parameter memory for a new weight, NaN so far; the old weight is given up."""
        if self.packed is not None and not self.packed_beside:
            with torch.inference_mode(mode=False), torch.no_grad():
                self.weight.data = torch.full(self.weight.shape, torch.nan, dtype=self.weight.dtype)
            self._forget()

    def _unpack_for_state_dicts(self) -> None:
        assert isinstance(self, nn.Module), "a mixin of modules"
        if not self._is_hooked:  # once: torch's loop over hooks allows no removal
            self._is_hooked = True
            self.register_state_dict_pre_hook(_unpack)
            self.register_load_state_dict_pre_hook(_expect_weight)

    def _forget(self) -> None:
        self.packed, self.packed_by, self.packed_beside = None, None, ()


def _unpack(layer: Packable, *_: object) -> None:
    layer.unpack()


def _expect_weight(layer: Packable, state: dict[str, object], prefix: str, *_: object) -> None:
    """Make room for the weight that is about to be loaded; a layer whose weight is not loaded stays packed."""
    if getattr(state.get(f"{prefix}weight"), "shape", None) == layer.weight.shape:
        layer.make_writable()


class PackableLinear(Packable, nn.Linear):  # type: ignore[misc]  # torch declares a Tensor, and it is a parameter
    """`nn.Linear` whose weight can be packed."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the bias: [..., i] -> [..., o]."""
        return self.product(x, self.bias)
