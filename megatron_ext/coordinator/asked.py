"""Alias module of `RoutedPrompt` under its former path, which an example of version 0.1 imported."""

from __future__ import annotations

from megatron_ext.coordinator.routed_request import RoutedPrompt as RoutedPrompt
