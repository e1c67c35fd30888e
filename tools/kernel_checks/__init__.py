"""Checks of Triton's kernels at the sizes of real models, without a GPU: see `docs/cuda.md`."""
