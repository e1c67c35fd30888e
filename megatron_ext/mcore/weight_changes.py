"""Whether a model's weights have changed, so that nothing computed with old ones is matched after new ones are in."""

from __future__ import annotations

import weakref
from operator import attrgetter

from torch import Tensor, nn

_ATTRIBUTE = "weights_version"
_HOOKED = "weights_load_hook"
_edits_of = attrgetter("_version")  # torch's own counter of a tensor's in-place edits; None has none


def weights_version(model: nn.Module) -> int:
    """How often the weights of `model` have been said to have changed since it was built."""
    return getattr(model, _ATTRIBUTE, 0)


def mark_weights_changed(model: nn.Module) -> None:
    """Every loader calls this after it has written weights; engines around the model notice before their next step."""
    setattr(model, _ATTRIBUTE, weights_version(model) + 1)


class WeightsWatch:
    """Notices changes of one model's parameters and persistent buffers; nothing is read back from the device.

    Seen are what loaders say (`mark_weights_changed`), `load_state_dict` of the model, by a hook, and whatever raises
    the version counter of a tensor: in-place operations, under `torch.no_grad` and `inference_mode` too, and loading
    into a submodule. A parameter that has been replaced is seen once the old one is gone.

    Not seen is what goes around the counter: writes through `tensor.data`, through a flat buffer that parameters are
    views of, by a kernel or another process that has the pointer only; and edits of tensors that were made in inference
    mode, which have no counter. Whoever writes so calls `mark_weights_changed`.

    Args:
        model: Its tensors are referred to weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if not hasattr(model, _HOOKED):  # other engines may be around it
            model.register_load_state_dict_post_hook(_on_load)
            setattr(model, _HOOKED, True)
        self._track()

    def has_changed(self) -> bool:
        """Whether anything has changed since the last call, or since the watch was made."""
        if weights_version(self._model) == self._version and self._count_edits() == self._edits:
            return False
        self._track()
        return True

    def _track(self) -> None:
        saved = self._model.state_dict(keep_vars=True).values()
        tensors = [one for one in saved if isinstance(one, Tensor) and not one.is_inference()]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._version = weights_version(self._model)
        self._edits = self._count_edits()

    def _count_edits(self) -> int | None:
        """Of all tensors together, which never falls; None if one is gone."""
        try:
            return sum(map(_edits_of, [tensor() for tensor in self._tensors]))
        except AttributeError:
            return None


def _on_load(model: nn.Module, _: object) -> None:
    mark_weights_changed(model)
