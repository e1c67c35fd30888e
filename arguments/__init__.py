"""Command line: argparse groups, each made of one frozen dataclass of `megatron_ext.config`."""

from arguments.parser import build_parser, build_server_parser, parse_arguments, parse_server_arguments

__all__ = ["build_parser", "build_server_parser", "parse_arguments", "parse_server_arguments"]
