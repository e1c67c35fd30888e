"""The command line: argparse groups, each bound to one frozen dataclass."""
