"""Commands of `megatron-ext`, as `python -m megatron_ext`, which torchrun starts, too."""

from __future__ import annotations

import sys

from megatron_ext.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
