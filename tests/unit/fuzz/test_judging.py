"""Tests of comparing a parallel run with a single-process run whose logs contain NaN."""

import math

import pytest
import torch
from safetensors.torch import save_file

from tests.fuzz.cases import simple_case
from tests.fuzz.judging import compare_runs


def logged(*values):
    return {"logged": [(("loss", "grad_norm")[index % 2], value) for index, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("on_ranks", "weight", "passes"),
    [
        # The step was skipped: later values are computed with other weights.
        ((2.0, math.nan, 1.9, 0.5), math.nan, True),
        ((2.1, math.nan, 1.9, 0.5), math.nan, False),
        ((2.0, 0.5, 1.9, 0.5), math.nan, False),
        # A loss without targets is NaN, but its gradients are zero.
        ((2.0, math.nan, 1.9, 0.5), 2.0, False),
    ],
)
def test_values_after_nan_are_not_compared(tmp_path, on_ranks, weight, passes):
    folders = {name: tmp_path / name for name in ("start", "ranks", "one")}
    for name, value in zip(folders, (1.0, 2.0, weight), strict=True):
        folders[name].mkdir()
        save_file({"weight": torch.full((2,), value)}, folders[name] / "model.safetensors")
    one = logged(2.0, math.nan, 0.0, math.nan)
    assert compare_runs(simple_case("tp2", "plain"), [logged(*on_ranks)], one, folders).passed == passes


def test_nan_loss_logged_as_zero_is_not_compared(tmp_path):
    folders = {name: tmp_path / name for name in ("start", "ranks", "one")}
    for name in folders:
        folders[name].mkdir()
        save_file({"weight": torch.full((2,), math.nan)}, folders[name] / "model.safetensors")
    case, ranks = simple_case("dp2", "plain"), [logged(4.4, math.nan)]
    assert compare_runs(case, ranks, logged(0.0, math.nan), folders).passed
    assert not compare_runs(case, ranks, logged(0.1, math.nan), folders).passed
