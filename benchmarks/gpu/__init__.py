"""What a GPU does with it: `python -m benchmarks.gpu`; see `__main__.py`."""
