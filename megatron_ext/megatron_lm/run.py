"""Run a script of a Megatron-LM checkout with the engine of this package."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megatron_ext.api.loading import Setting
from megatron_ext.console.start import limit_spinning
from megatron_ext.console.terminal import report_error
from megatron_ext.errors import ConfigError

PROGRAM = "python -m megatron_ext.megatron_lm"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as Python would, but with substituted names; see `substitution`.

    Args:
        argv: Options, the script and its arguments; None for the process's own.

    Returns:
        Exit code: 0 if the script ended, 2 after a `ConfigError`, which is reported as one line. Whatever else the
            script raises, `SystemExit` too, is raised.
    """
    given = _parser().parse_args(argv)
    try:
        run_script(given.script, given.arguments, dict(_setting(one) for one in given.setting))
    except ConfigError as error:
        return report_error(PROGRAM, error)
    return 0


def run_script(script: Path, arguments: Sequence[str], settings: Mapping[str, Setting]) -> None:
    """Run a script to its end.

    The script's folder is first on the path, as with Python, and its checkout last: `megatron.training` and `examples`
    come from there, and `megatron.core` is the installed one.

    Args:
        settings: Settings of `attach_engine` for engines that the script constructs by hand.

    Raises:
        ConfigError: There is no such script, or its checkout is of another version than the installed megatron-core;
            or as `attach_engine`.
    """
    if not script.is_file():
        raise ConfigError(f"{script} is not a file; give the path of a script of a Megatron-LM checkout")
    limit_spinning()
    checkout = checkout_of(script)
    from megatron_ext.megatron_lm.substitution import substituted  # after `limit_spinning`

    path, arguments_before = list(sys.path), sys.argv
    sys.path.insert(0, str(script.parent.resolve()))
    if checkout is not None:
        sys.path.append(str(checkout))
    sys.argv = [str(script), *arguments]
    try:
        with substituted(**settings):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.path[:], sys.argv = path, arguments_before


def checkout_of(script: Path) -> Path | None:
    """Return the folder above a script that has `megatron/training`; None without one.

    Raises:
        ConfigError: It is of another version than the megatron-core that an import finds.
    """
    from megatron_ext.mcore.upstream_version import found_version, version_in

    checkout = next((one for one in script.resolve().parents if (one / "megatron" / "training").is_dir()), None)
    if checkout is None or not (checkout / "megatron" / "core").is_dir():
        return checkout
    theirs, found = version_in(checkout / "megatron" / "core"), found_version()
    if theirs[:2] != found[:2]:
        raise ConfigError(
            f"{checkout} is of megatron-core {theirs}, and {found} is installed; check out the tag core_v{found}"
        )
    return checkout


def _setting(text: str) -> tuple[str, Setting]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--setting {text!r} is not NAME=VALUE")
    try:
        return name.replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--setting {text!r} has a value that is not YAML: {reason}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of attach_engine for an engine that the script constructs by hand; may be repeated",
    )
    parser.add_argument("script", type=Path, help="path of the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser
