#!/usr/bin/env python
"""List, verify or erase a prefix cache on disk; see the command `megatron-ext prefix-cache`."""

from __future__ import annotations

import sys

from megatron_ext.commands.prefix_cache import main

if __name__ == "__main__":
    sys.exit(main(program="prefix_cache.py"))
