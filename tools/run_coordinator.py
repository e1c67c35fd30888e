#!/usr/bin/env python
"""Serve in front of replicas; see the command `megatron-ext coordinate`."""

from __future__ import annotations

import sys

from megatron_ext.commands.coordinate import main

if __name__ == "__main__":
    sys.exit(main(program="run_coordinator.py"))
