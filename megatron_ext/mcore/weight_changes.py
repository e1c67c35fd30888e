"""Detection of weight changes, so that results of old weights are never matched after new ones are loaded."""

from __future__ import annotations

import weakref
from operator import attrgetter

from torch import Tensor, nn

_ATTRIBUTE = "weights_version"
_HOOKED = "weights_load_hook"
_edits_of = attrgetter("_version")  # torch's own counter of a tensor's in-place edits; fails for None


def weights_version(model: nn.Module) -> int:
    """Return the number of marked weight changes of `model` since it was built."""
    return getattr(model, _ATTRIBUTE, 0)


def mark_weights_changed(model: nn.Module) -> None:
    """Mark the weights as changed; every loader calls this after writing. Engines check before each step."""
    setattr(model, _ATTRIBUTE, weights_version(model) + 1)


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters (shared ones once) and persistent buffers, by the names of its state dict.

    Unlike a state dict this leaves packed weights as they are: their parameters have shape and type, and no values.
    """
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    }
    return dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in persistent}


class WeightsWatch:
    """Detector of changes of one model's parameters and persistent buffers; nothing is read back from the device.

    Detected are calls of `mark_weights_changed`, `load_state_dict` of the model (by a hook), and whatever raises the
    version counter of a tensor: in-place operations, under `torch.no_grad` and `inference_mode` too, and loading into a
    submodule. A replaced parameter is detected once the old one is freed.

    Not detected are writes that bypass the counter: through `tensor.data`, through a flat buffer that parameters are
    views of, by a kernel or another process that has only the pointer; and edits of tensors that were made in inference
    mode, which have no counter. Call `mark_weights_changed` after such writes.

    Args:
        model: Model to watch; its tensors are referenced weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if not hasattr(model, _HOOKED):  # other engines may share the model
            model.register_load_state_dict_post_hook(_on_load)
            setattr(model, _HOOKED, True)
        self._track()

    def has_changed(self) -> bool:
        """Return whether anything has changed since the last call, or since the watch was made."""
        if self.is_current:
            return False
        self._track()
        return True

    @property
    def is_current(self) -> bool:
        """True if nothing has changed since the last call of `has_changed`, or since the watch was made."""
        return weights_version(self._model) == self._version and self._count_edits() == self._edits

    def _track(self) -> None:
        tensors = [one for one in saved_tensors(self._model).values() if not one.is_inference()]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._version = weights_version(self._model)
        self._edits = self._count_edits()

    def _count_edits(self) -> int | None:
        """Return the sum of all tensors' edit counts, which never falls; None if a tensor is freed."""
        try:
            return sum(map(_edits_of, [tensor() for tensor in self._tensors]))
        except AttributeError:
            return None


def _on_load(model: nn.Module, _: object) -> None:
    mark_weights_changed(model)
