"""Tests of TRL's own scripts, unmodified or with only the import and the argument added (see
`tests.helpers.third_party_scripts`).
"""

import pytest

from tests.helpers.third_party_scripts import (
    LAYOUTS,
    LOSS,
    WEIGHTS,
    compare_layout,
    compile_script,
    find_trl_script,
    make_data,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts")
    make_data(path)
    return path


@pytest.mark.parametrize("name", ["sft.py", "dpo.py"])
def test_edited_scripts_match_single_process(folder, name):
    expected = None
    for layout in LAYOUTS[name].split(","):
        (worst, number), apart, count, expected = compare_layout(find_trl_script(name), folder, layout, expected)
        assert count > 20
        assert worst <= LOSS and apart <= WEIGHTS, (layout, number, worst, apart)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("sft.py", "tp2+pp2"), ("dpo.py", "dp2"), ("kto.py", "tp2+sp"), ("reward.py", "pp2"), ("reward.py", "tp2")],
)
def test_unmodified_scripts_match_single_process(folder, name, layout):
    (worst, number), apart, count, _ = compare_layout(find_trl_script(name), folder, layout, launched=True)
    assert count > 20
    assert worst <= LOSS and apart <= WEIGHTS, (number, worst, apart)


# Dropout is off because its masks would differ between layouts.
ADAPTER = [
    "--use_peft",
    "--lora_r",
    "4",
    "--lora_dropout",
    "0.0",
    "--lora_target_modules",
    "q_proj",
    "v_proj",
    "down_proj",
]


@pytest.mark.parametrize(
    ("name", "flags"), [("sft.py", ()), ("dpo.py", ()), ("reward.py", ("--lora_task_type", "SEQ_CLS"))]
)
def test_unmodified_scripts_with_an_adapter(folder, name, flags):
    expected = None
    for layout in ("tp2+sp", "pp2", "dp2"):
        (worst, number), apart, count, expected = compare_layout(
            find_trl_script(name), folder, layout, expected, launched=True, flags=(*ADAPTER, *flags)
        )
        assert count > 20
        assert worst <= LOSS and apart <= WEIGHTS, (layout, number, worst, apart)


@pytest.mark.parametrize("name", ["sft.py", "dpo.py"])
def test_import_and_argument_are_added(name):
    assert "LAYOUT" not in compile_script(find_trl_script(name), False).co_names
    code = compile_script(find_trl_script(name), True)
    functions = [constant for constant in code.co_consts if hasattr(constant, "co_names")]
    assert "hf_megatron" in code.co_names and any("LAYOUT" in function.co_names for function in functions)
