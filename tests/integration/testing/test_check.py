"""Models that `hf-megatron check` compares beside each other, each with ranks of its own."""

import pytest

from hf_megatron.config import MegatronConfig
from hf_megatron.errors import ConfigError
from hf_megatron.models.verified import read_results
from hf_megatron.testing.check import check_models, in_forks


def test_models_side_by_side_have_the_samples_of_models_in_turn(tmp_path):
    models, layouts, file = ["gpt2", "llama"], [MegatronConfig(tp_size=2)], tmp_path / "rows.json"
    said: list[str] = []

    rows = check_models(models, layouts, workers=2, record=file, echo=said.append)

    in_turn = check_models(models, layouts, echo=lambda line: None)
    assert sorted(rows, key=str) == sorted(in_turn, key=str)
    assert len(said) == len(rows) == len(read_results(file.read_text())) == len(models)


def test_a_model_that_no_one_can_check_ends_the_others():
    with pytest.raises(ConfigError, match="MODEL = 'nosuch'"):
        check_models(["nosuch", "llama"], [MegatronConfig(tp_size=2)], workers=2, echo=lambda line: None)


@pytest.mark.parametrize("workers", [1, 3])
def test_each_case_comes_with_what_it_returned_or_raised(workers):
    outcomes = dict(in_forks(_inverse, [(number,) for number in (0, 1, 2, 4)], workers))

    with pytest.raises(ZeroDivisionError):
        outcomes.pop((0,))()
    assert {number: outcome() for (number,), outcome in outcomes.items()} == {1: 1.0, 2: 0.5, 4: 0.25}


def _inverse(number: int) -> float:
    return 1 / number
