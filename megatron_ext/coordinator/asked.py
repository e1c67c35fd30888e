"""Alias module of `RoutedPrompt` under its former path, which examples/ray_serve imported."""

from __future__ import annotations

from megatron_ext.coordinator.routed_request import RoutedPrompt as RoutedPrompt
