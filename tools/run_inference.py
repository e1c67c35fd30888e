#!/usr/bin/env python
"""Run prompts; see the command `megatron-ext run`."""

from __future__ import annotations

import sys

from megatron_ext.commands.run import run_process

if __name__ == "__main__":
    sys.exit(run_process(program="run_inference.py"))
