"""Tests of instruction tuning scripts in the structure of Alpaca's, FastChat's, LLaVA's and Qwen's: logs, files and the
model that stock transformers loads equal those of one process, which runs the same script without an edit.
"""

import pytest

from hf_megatron import MegatronConfig
from hf_megatron.core.layouts import parse_layouts

from .runs import compare_runs, make_inputs, run_forked

# The distributed optimizer (ZeRO-1) is the default.
LAYOUTS = {
    "alpaca": ["tp2", "pp2", "cp2", "dp2", "dp2+zero3", "tp2+dp2"],
    "fastchat": ["tp2", "pp2", "dp2", "dp2+zero3"],
    "qwen": ["tp2", "pp2", "dp2", "dp2+zero3"],
    "qwen-lora": ["tp2", "pp2", "dp2", "dp2+zero3"],
    "llava-lora": ["tp2", "pp2", "dp2"],
}


def parse_layout(text: str) -> MegatronConfig:
    return next(iter(parse_layouts(text)))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folder with models, tokenizers and data."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def run_single(inputs, tmp_path_factory):
    """Function that returns the folder of a case's single-process run."""
    folder = tmp_path_factory.mktemp("single")

    def run(case):
        if not (folder / case).exists():
            # Qwen's script saves only where `local_rank` is 0.
            run_forked(case, inputs, folder / case, None, ["--local_rank", "0"])
        return folder / case

    return run


@pytest.mark.parametrize(("case", "layout"), [(case, layout) for case in LAYOUTS for layout in LAYOUTS[case]])
def test_scripts_match_single_process(inputs, run_single, tmp_path, case, layout):
    run_forked(case, inputs, tmp_path / "out", parse_layout(layout))
    compare_runs(case, inputs, tmp_path / "out", run_single(case))


def test_another_global_batch_is_noticed(inputs, run_single, tmp_path):
    """A seeded fault: dp ranks that each take a single process's batch size."""
    output = tmp_path / "out"
    run_forked("alpaca", inputs, output, parse_layout("dp2"), ["--per_device_train_batch_size", "4"])
    with pytest.raises(AssertionError):
        compare_runs("alpaca", inputs, output, run_single("alpaca"))
