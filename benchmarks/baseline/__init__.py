"""Figures that later versions are measured against: steps, start, skipped tokens of traces, objects of a request.

RESULTS.md has the figures before the package was reduced. Cases that time take turns with other checkouts, named by the
setting `others`, since figures of two runs cannot be compared.
"""
