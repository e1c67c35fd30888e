"""Samples of the weights of an attached model: they show writes that no version counter does, if these were not told.

Writes through `tensor.data` or through a flat buffer that parameters are views of leave no trace. Results cached before
would be matched after them, and the text would still look fluent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from megatron_ext.errors import SilentWeightChange

SAMPLES = 64  # values of each tensor
IDLE_SECONDS = 1.0
_ATTRIBUTE = "weight_samples"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSamples:
    """Values of each tensor of a model, which are compared after an idle second.

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
    setattr(model, _ATTRIBUTE, samples)


def samples_of(model: nn.Module) -> WeightSamples | None:
    """Return the samples of a model that is attached; None for another one."""
    return getattr(model, _ATTRIBUTE, None)


def _sample(tensor: Tensor) -> Tensor:
    """Return the bits of `SAMPLES` evenly spaced values, the first and the last among them; NaN equals itself so."""
    places = torch.linspace(0, tensor.numel() - 1, SAMPLES, dtype=torch.float64).long()
    return tensor.detach().flatten()[places.to(tensor.device)].view(_BITS[tensor.element_size()])
