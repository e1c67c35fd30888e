"""Entry of `python -m megatron_ext.megatron_lm`."""

from __future__ import annotations

import sys

from megatron_ext.megatron_lm.run import main

if __name__ == "__main__":
    sys.exit(main())
