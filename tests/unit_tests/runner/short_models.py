"""Models of the tests of this folder: of each kind two mixers that keep something, and as little else as possible."""

from __future__ import annotations

import dataclasses

from tests.unit_tests.support import models

PATTERNS = {
    "side_by_side": "P-P",
    "short_conv": "M*M",
    "hybrid": "M*-M",
    "attention_only": "*-*",
    "attention_free": "M-M",
    "gated_delta_net": "M*M",
    "mamba1": "M*M",
    "experts": "ME*E",
}
CONFIGS = {
    kind: dataclasses.replace(models.CONFIGS[kind], hybrid_override_pattern=pattern)
    for kind, pattern in PATTERNS.items()
}
