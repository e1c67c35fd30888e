#!/usr/bin/env python
"""Run prompts through the dynamic inference engine. Without flags: the embedded model on the shipped prompts."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from arguments import parse_arguments
from megatron_ext.errors import ConfigError
from megatron_ext.memory.limits import check_address_space

DONE, REQUEST_FAILED, BAD_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn a user's mistake into one line on standard error.

    Returns:
        The exit code: 0 done, 1 a request failed, 2 bad usage.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # it warns of each optional package that is missing
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron_ext").setLevel(logging.INFO)
    try:
        settings = parse_arguments(argv, prog="run_inference.py")
        check_address_space()
        # Imported here so that --help and a wrong flag are answered at once: torch takes seconds.
        from megatron_ext.serving.offline import run_offline

        return DONE if run_offline(settings) else REQUEST_FAILED
    except ConfigError as error:
        print(f"run_inference.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_USAGE


if __name__ == "__main__":
    sys.exit(main())
