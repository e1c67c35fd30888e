"""Alias module of `ApproximatePrefixIndex` under its former name, which examples/ray_serve imported."""

from __future__ import annotations

from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex

Remembered = ApproximatePrefixIndex
