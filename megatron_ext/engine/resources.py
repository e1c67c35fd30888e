"""Model resources as used by the engine core: weights that may change, pools that are allocated and freed."""

from __future__ import annotations

from megatron_ext.config.batching import SuspendLevel


class ModelResources:
    """Weights and pools of the model on this rank; this base class serves engines without a model.

    Attributes:
        suspend_level: Level of a suspend that names none.
    """

    suspend_level: SuspendLevel = "drop"

    def has_new_weights(self) -> bool:
        """Return whether the weights changed since the last call."""
        return False

    def check_weights(self, *, is_caching: bool) -> None:
        """Check that an engine that was idle has the weights that it knows of, before requests are added.

        Args:
            is_caching: True if the engine keeps KV blocks or states of earlier requests.

        Raises:
            SilentWeightChange: It has others.
        """

    def mark_new_weights(self) -> None:
        """Record an in-place write of the weights; every engine around the model detects it."""

    def use_new_weights(self) -> None:
        """Drop everything on the device that was derived from the old weights, such as captured graphs."""

    def allocate(self) -> None:
        """Allocate the pools if they are absent."""

    def capture(self) -> None:
        """Capture the CUDA graphs that the settings ask for."""

    def free(self, *, offloads: bool = False) -> None:
        """Free the pools, and whatever else the next step can make again.

        Args:
            offloads: Whether the pools' contents wait in host memory until `allocate`; otherwise they are lost.
        """

    def bind_thread(self) -> None:
        """Make the calling thread use the model's device."""
