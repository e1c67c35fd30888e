#!/usr/bin/env python
"""Serve a model; see the command `megatron-ext serve`."""

from __future__ import annotations

import sys

from megatron_ext.commands.serve import main

if __name__ == "__main__":
    sys.exit(main(program="run_server.py"))
