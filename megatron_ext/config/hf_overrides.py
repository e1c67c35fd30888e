"""Changes of the fields of a Hugging Face `config.json`, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

_NESTED = "_config"  # ending of the names of nested configurations, such as `text_config`


class HfOverrides(str):
    """JSON object of fields and their values; a null is a null in the file, as vLLM has it."""

    expected: ClassVar[str] = 'a JSON object of fields, as in {"rope_theta": 1000000, "sliding_window": null}'

    @classmethod
    def of(cls, value: object) -> HfOverrides:
        """Convert a mapping, or the text of a JSON object.

        Raises:
            ValueError: The value has another form.
        """
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(cls.expected)
        return cls(text)

    @classmethod
    def parse(cls, text: str) -> HfOverrides:
        """Parse command-line text; otherwise as `of`."""
        return cls.of(text)

    def over(self, raw: Mapping[str, object]) -> dict[str, object]:
        """Return a decoded `config.json` with these fields; nested configurations are merged, other values replaced."""
        changed = dict(raw)
        for name, value in json.loads(self).items():
            before = changed.get(name)
            if name.endswith(_NESTED) and isinstance(before, dict) and isinstance(value, dict):
                value = {**before, **value}
            changed[name] = value
        return changed
