"""Command line: argparse groups, each bound to one frozen dataclass of `megatron_ext.config`."""

from arguments.coordinator import build_coordinator_parser, parse_coordinator_arguments
from arguments.parser import build_parser, build_server_parser, parse_arguments, parse_server_arguments

__all__ = [
    "build_coordinator_parser",
    "build_parser",
    "build_server_parser",
    "parse_arguments",
    "parse_coordinator_arguments",
    "parse_server_arguments",
]
