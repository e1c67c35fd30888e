"""Former path of `RoutedPrompt`, which examples/ray_serve imported from here."""

from __future__ import annotations

from megatron_ext.coordinator.routed_request import RoutedPrompt as RoutedPrompt
