"""CU-8: what `benchmarks.gpu` calls right has to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu


def record(tokens: list[int], log_probs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(generated_tokens=tokens, generated_log_probs=log_probs)


def test_equal_up_to_a_tie():
    one, other = record([1, 2, 3], [-1.0, -2.0, -3.0]), record([1, 4, 9], [-1.0, -2.0001, -8.0])
    assert gpu._difference(one, other) == pytest.approx(1e-4)


def test_other_tokens_from_the_start_are_no_agreement():
    assert gpu._difference(record([1], [-1.0]), record([2], [-5.0])) == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no CUDA device is here" in capsys.readouterr().err
