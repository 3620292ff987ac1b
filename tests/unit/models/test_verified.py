"""Tests of recorded weight draws for tiny models."""

import math
from types import SimpleNamespace

import pytest

from hf_megatron.models import verified
from hf_megatron.models.verified import recorded_draw, tested_versions
from hf_megatron.testing.parity import best_draw

ROUND_OFF = [3.0, 2.0, 5.0, 0.0, 1.0]


def make_draw(asked):
    def draw(number, best):
        asked.append((number, best))
        return SimpleNamespace(reference=SimpleNamespace(round_off=ROUND_OFF[number]))

    return draw


def test_best_draw_takes_the_first_good_draw():
    calls = []
    chosen, others = best_draw(make_draw(calls))
    assert chosen.draw == 3 and [tiny_model.draw for tiny_model in others] == [0, 1, 2]
    assert calls == [(0, math.inf), (1, 3.0), (2, 2.0), (3, 2.0)]


def test_known_draw_is_drawn_once():
    calls = []
    chosen, others = best_draw(make_draw(calls), known=1)
    assert chosen.draw == 1 and not others and calls == [(1, math.inf)]


RECIPE = {"task": "causal", "layers": 2, "rows": 3}


@pytest.mark.parametrize(
    ("changes", "made_of", "versions", "number"),
    [
        ({}, RECIPE, {}, 4),
        ({"tie": True}, RECIPE, {}, None),
        ({}, {**RECIPE, "layers": 4}, {}, None),
        ({}, RECIPE, {"torch": "2.9.0"}, None),
    ],
)
def test_recorded_draw_needs_equal_model_and_versions(changes, made_of, versions, number, monkeypatch):
    row = {"model_type": "llama", "changes": {}, "draw": {**RECIPE, "number": 4}}
    row["versions"] = tested_versions() | versions
    monkeypatch.setattr(verified, "records", lambda: ({"model_type": "llama", "changes": {}}, row))
    assert recorded_draw("llama", changes, made_of) == number
