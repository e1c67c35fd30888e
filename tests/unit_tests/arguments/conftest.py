from __future__ import annotations

import pytest

from arguments import parse_arguments
from megatron_ext.errors import ConfigError


@pytest.fixture
def one_line_error():
    """A function: the message with which parsing of its arguments fails, which must be one line."""

    def fail(*argv: str) -> str:
        with pytest.raises(ConfigError) as caught:
            parse_arguments(argv)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return fail
