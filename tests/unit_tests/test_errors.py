"""Messages of errors have numbers and one short line."""

from __future__ import annotations

import pytest

from megatron_ext.errors import CapacityError, CheckpointError, ConfigError


class TestErrors:
    @pytest.mark.parametrize(
        ("resource", "message"),
        [
            ("blocks", "65 blocks needed, 64 available"),
            ("slots", "65 slots needed, 64 available"),
            ("requests", "room for 65 requests is needed, for 64 there is"),
            ("tokens", "a step of 65 tokens is needed, 64 are possible"),
            ("sequence_length", "a sequence of 65 tokens is needed, 64 are possible"),
        ],
    )
    @pytest.mark.parametrize(("is_transient", "when"), [(True, "now"), (False, "at all")])
    def test_capacity_errors_have_numbers(self, resource: str, message: str, is_transient: bool, when: str):
        """KV-12: the message has the needed and the available amounts."""
        error = CapacityError(resource, 65, 64, is_transient)
        assert str(error) == f"{message} {when}"
        assert (error.resource, error.needed, error.available, error.is_transient) == (resource, 65, 64, is_transient)

    def test_one_unit_is_singular(self):
        assert str(CapacityError("blocks", 1, 0, is_transient=True)) == "1 block needed, 0 available now"

    def test_the_message_of_a_configuration_error_is_one_short_line(self):
        """SE-1: the message is one short line for any value from a foreign file."""
        assert str(ConfigError("a\nb\x1b[2J é")) == "a\\nb\\x1b[2J é"
        assert str(ConfigError("x" * 5000)) == "x" * 4000 + "... (5000 characters)"

    def test_configuration_errors_are_value_errors(self):
        assert issubclass(ConfigError, ValueError)
        assert issubclass(CheckpointError, ConfigError)
