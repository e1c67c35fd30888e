from __future__ import annotations

import os

# The operator's schema that this module reads is not in the tree.
collect_ignore = [] if "KUBERAY_CRD" in os.environ else ["test_operator_schema.py"]
