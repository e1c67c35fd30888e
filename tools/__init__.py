"""Tools of this repository, run with `python -m tools.NAME`.

A regular package, as `tests` is: else a checkout of Megatron-LM on PYTHONPATH, whose `tools` is one, hides it.
"""
