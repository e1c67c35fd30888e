"""Outputs of one's own that are pinned in one's own continuous integration."""
