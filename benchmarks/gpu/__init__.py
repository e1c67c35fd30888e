"""GPU benchmark: `python -m benchmarks.gpu`; see `__main__.py`."""
