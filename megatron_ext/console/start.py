"""What a run says, and sets, before anything else."""

from __future__ import annotations

import logging
import os

from megatron_ext.config import StartNotes

logger = logging.getLogger(__name__)


def say_start(start: StartNotes) -> None:
    """Say what was accepted and has no effect; of several ranks the first one says it."""
    if os.environ.get("RANK", "0") in ("", "0"):
        for line in start.lines:
            logger.warning("%s", line)
