"""Models that `hf-megatron check` compares beside each other, each with ranks of its own."""

import pytest

from hf_megatron.config import MegatronConfig
from hf_megatron.errors import ConfigError
from hf_megatron.models.verified import read_results
from hf_megatron.testing.check import check_models, in_forks


def test_parallel_and_sequential_results_agree(tmp_path):
    models, layouts, file = ["gpt2", "llama"], [MegatronConfig(tp_size=2)], tmp_path / "rows.json"
    lines: list[str] = []

    rows = check_models(models, layouts, workers=2, record=file, echo=lines.append)

    sequential_rows = check_models(models, layouts, echo=lambda line: None)
    assert sorted(rows, key=str) == sorted(sequential_rows, key=str)
    assert len(lines) == len(rows) == len(read_results(file.read_text())) == len(models)


def test_unknown_model_raises():
    with pytest.raises(ConfigError, match="MODEL = 'nosuch'"):
        check_models(["nosuch", "llama"], [MegatronConfig(tp_size=2)], workers=2, echo=lambda line: None)


@pytest.mark.parametrize("workers", [1, 3])
def test_forked_cases_return_results_or_errors(workers):
    outcomes = dict(in_forks(invert, [(number,) for number in (0, 1, 2, 4)], workers))

    with pytest.raises(ZeroDivisionError):
        outcomes.pop((0,))()
    assert {number: outcome() for (number,), outcome in outcomes.items()} == {1: 1.0, 2: 0.5, 4: 0.25}


def invert(number: int) -> float:
    return 1 / number
