"""Former path and name of `ApproximatePrefixIndex`, which examples/ray_serve imported from here."""

from __future__ import annotations

from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex

Remembered = ApproximatePrefixIndex
