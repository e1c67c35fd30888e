"""Alias module of `ApproximatePrefixIndex` under its former name, which an example of version 0.1 imported."""

from __future__ import annotations

from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex

Remembered = ApproximatePrefixIndex
