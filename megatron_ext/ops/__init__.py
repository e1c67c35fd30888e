"""Operators of the layers: one folder each, with a plain-torch reference that runs on any device."""
