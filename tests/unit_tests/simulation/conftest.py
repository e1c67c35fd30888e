from __future__ import annotations

import os

# Whole traces are not in the tree.
collect_ignore = [] if "MEGATRON_EXT_TRACES" in os.environ else ["test_whole_traces.py"]
