"""Messages of errors have numbers and one short line."""

from __future__ import annotations

from megatron_ext.errors import CheckpointError, ConfigError


class TestErrors:
    def test_the_message_of_a_configuration_error_is_one_short_line(self):
        """SE-1: the message is one short line for any value from a foreign file."""
        assert str(ConfigError("a\nb\x1b[2J é")) == "a\\nb\\x1b[2J é"
        assert str(ConfigError("x" * 5000)) == "x" * 4000 + "... (5000 characters)"

    def test_configuration_errors_are_value_errors(self):
        assert issubclass(ConfigError, ValueError)
        assert issubclass(CheckpointError, ConfigError)
