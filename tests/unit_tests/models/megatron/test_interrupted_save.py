"""SE-4: a signal during a save leaves no new files, and the old checkpoint unchanged."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem

from megatron_ext.config import ModelConfig, SourceConfig
from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface import export
from megatron_ext.models.load import load_model
from megatron_ext.models.megatron.dist_checkpoint import save_dist_checkpoint
from megatron_ext.signals import Interrupted, Interruption

# What writes a form, and the function of a library that it writes with.
SAVES = {
    "Hugging Face": (export.save_hf_checkpoint, export, "save_file"),
    "distributed": (save_dist_checkpoint, filesystem, "_write_item"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def signal_after(right, number: int):
    """`right`, and then the signal comes: files have been written."""

    def do_both(*args, **kwargs):
        result = right(*args, **kwargs)
        signal.raise_signal(number)
        return result

    return do_both


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
@pytest.mark.parametrize("form", SAVES)
def test_a_signal_while_weights_are_written(
    form: str, number: int, tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path, monkeypatch
) -> None:
    """Into a new place and over an old checkpoint. Torch's writer makes an error of its own of what is raised in it."""
    save, module, name = SAVES[form]
    old, new = tmp_path / "old", tmp_path / "folders" / "that are" / "new"
    save_dist_checkpoint(old, tiny_model, tiny_config)
    before = contents(tmp_path)
    monkeypatch.setattr(module, name, signal_after(getattr(module, name), number))
    for target in (new, old) if form == "distributed" else (new,):
        with pytest.raises(Interrupted) as caught, Interruption():
            save(target, tiny_model, tiny_config)
        assert caught.value.number == number
        assert contents(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["old"], "neither scratch nor the new folders are left"


def test_a_signal_while_the_old_checkpoint_is_replaced(
    tiny_model: nn.Module, tiny_config: ModelConfig, tmp_path: Path, monkeypatch
) -> None:
    """A replacement that has begun is finished: there is always one whole checkpoint.

    The signal takes effect after it.
    """
    target = tmp_path / "checkpoint"
    save_dist_checkpoint(target, tiny_model, tiny_config)
    rename, calls = Path.rename, []

    def rename_and_signal(path: Path, other: Path) -> Path:
        done = rename(path, other)
        if tmp_path in (path.parent, other.parent):
            calls.append(path.name)
            signal.raise_signal(signal.SIGTERM)
        return done

    monkeypatch.setattr(Path, "rename", rename_and_signal)
    with pytest.raises(Interrupted), Interruption():
        save_dist_checkpoint(target, tiny_model, tiny_config, dtype=torch.bfloat16)
    assert calls == ["checkpoint", "new"]
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_sigterm_ends_a_program_without_a_handler(tmp_path: Path) -> None:
    """SIGTERM's default is to kill, without a chance to clean up: so it is for a server that loads, and for scripts."""
    code = f"""
import signal, sys
from pathlib import Path
from megatron_ext.models.new_directory import new_directory
with new_directory(Path({str(tmp_path / "new" / "checkpoint")!r})) as directory:
    (directory / "weights").write_text("half")
    print(len(list(Path({str(tmp_path)!r}).rglob("weights"))), flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("not reached")
"""
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", code]  # megatron-core may miss a library
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGTERM, "1\n", "")
    assert list(tmp_path.iterdir()) == []


def refusal_of(target: Path) -> str:
    """The message with which loading refuses a place to save to, before it looks at the checkpoint."""
    with pytest.raises(ConfigError) as caught:
        load_model(SourceConfig(save=str(target), load="nowhere"), {})
    return str(caught.value)


def test_targets_that_cannot_be_written_are_found_before_anything_is_loaded(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target, message in (
        (tmp_path / "file" / "checkpoint", "cannot be written: "),
        (tmp_path / "link", "is a broken link; give a directory"),
        (Path("/"), "--save / is a mount point; give a directory in it"),
        (tmp_path / "new" / "checkpoint", "--load nowhere"),  # this place would do
    ):
        assert message in refusal_of(target)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}

    def read_only(*_: object, **__: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    there = tmp_path / "not" / "there"
    assert re.fullmatch(f"--save {there} cannot be written: .*Read-only file system", refusal_of(there))
