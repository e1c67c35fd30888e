"""Import paths that the examples of version 0.1 promised, and that have moved since."""

from __future__ import annotations

from megatron_ext.coordinator.approximate_prefix_index import ApproximatePrefixIndex
from megatron_ext.coordinator.asked import RoutedPrompt as FormerRoutedPrompt
from megatron_ext.coordinator.remembered import Remembered
from megatron_ext.coordinator.routed_request import RoutedPrompt


def test_former_import_paths_give_the_same_classes():
    assert FormerRoutedPrompt is RoutedPrompt
    assert Remembered is ApproximatePrefixIndex
