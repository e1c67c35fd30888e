"""GPU: correctness on a CUDA device first, then speed; `python -m benchmarks gpu` in under ten minutes (CU-8)."""
