#!/usr/bin/env python
"""Explain why a prompt misses another one's cached prefix; see the command `megatron-ext explain`."""

from __future__ import annotations

import sys

from megatron_ext.commands.explain import main

if __name__ == "__main__":
    sys.exit(main(program="explain_prefix.py"))
