#!/usr/bin/env python
"""Simulate the prefix cache; see the command `megatron-ext simulate`."""

from __future__ import annotations

import sys

from megatron_ext.commands.simulate import main

if __name__ == "__main__":
    sys.exit(main(program="simulate_cache.py"))
