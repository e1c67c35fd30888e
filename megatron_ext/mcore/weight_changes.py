"""Detection of weight changes, so that results of old weights are never matched after new ones are loaded."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter

import torch
from torch import Tensor, nn

from megatron_ext.errors import SilentWeightChange

_ATTRIBUTE = "weights_version"
_HOOKED = "weights_load_hook"
_edits_of = attrgetter("_version")  # torch's own counter of a tensor's in-place edits; fails for None
SAMPLES = 64  # values of each tensor
IDLE_SECONDS = 1.0
_SAMPLES_ATTRIBUTE = "weight_samples"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


class WeightSamples:
    """Values of each tensor of an attached model, compared after an idle second: they show writes without a trace.

    Writes through `tensor.data` or through a flat buffer that parameters are views of raise no version counter. Results
    cached before would be matched after them, and the text would still look fluent.

    A check reads `SAMPLES` evenly spaced values of each tensor on this rank, and compares them in one go; its cost does
    not depend on the sizes of the tensors (docs/python.md has figures).

    Args:
        tensors: Name in the caller's model -> tensor that is shared with it.
        source: The caller's model, in which a tensor may be replaced.
        clock: Seconds from any start.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], source: nn.Module, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tensors = dict(tensors)
        self._source = source
        self.clock = clock
        self._active_at = clock()
        self.take()

    def take(self) -> None:
        """Replace the samples by the present values, which results are computed with from now on.

        Raises:
            SilentWeightChange: The caller's model has another tensor in the place of a shared one.
        """
        self._check_tensors()
        self._kept = self._read()

    def note_activity(self) -> None:
        """Note that a step is taken, so that the engine is not idle."""
        self._active_at = self.clock()

    def check(self) -> None:
        """Compare the samples if the last step, or the last check, was begun `IDLE_SECONDS` ago or earlier.

        Raises:
            SilentWeightChange: A tensor has other values; the message names it. It is raised again until `take`.
        """
        if self.clock() - self._active_at < IDLE_SECONDS:
            return
        self._check_tensors()
        for kept, found, names in zip(self._kept, self._read(), self._names_by_width(), strict=True):
            if torch.equal(kept, found):
                continue
            row = int((kept != found).any(dim=1).nonzero()[0])
            raise SilentWeightChange(
                f"{names[row]} was changed by a write that no version counter shows; call weights_changed() after such "
                "writes"
            )
        self.note_activity()

    def _read(self) -> list[Tensor]:
        """Return the bits of the samples, [tensors, SAMPLES] for each width of values."""
        with torch.no_grad():
            return [torch.stack([_sample(self._tensors[name]) for name in names]) for names in self._names_by_width()]

    def _names_by_width(self) -> list[list[str]]:
        widths = sorted({tensor.element_size() for tensor in self._tensors.values()})
        return [[name for name, one in self._tensors.items() if one.element_size() == width] for width in widths]

    def _check_tensors(self) -> None:
        for name, tensor in self._tensors.items():
            path, _, leaf = name.rpartition(".")
            if getattr(self._source.get_submodule(path), leaf, None) is not tensor:
                raise SilentWeightChange(
                    f"{name} of the model is another tensor now; close the engine, and attach anew"
                )


def keep_samples(model: nn.Module, samples: WeightSamples) -> None:
    """Let engines of a model of ours find the samples."""
    setattr(model, _SAMPLES_ATTRIBUTE, samples)


def samples_of(model: nn.Module) -> WeightSamples | None:
    """Return the samples of a model that is attached; None for another one."""
    return getattr(model, _SAMPLES_ATTRIBUTE, None)


def _sample(tensor: Tensor) -> Tensor:
    """Return the bits of `SAMPLES` evenly spaced values, the first and the last among them; NaN equals itself so."""
    places = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64).long()
    return tensor.detach().flatten()[places.to(tensor.device)].view(_BITS[tensor.element_size()])
