"""Tests of `hf-megatron env`: what a bug report needs, and nothing secret."""

import json
import os
import subprocess
import sys

from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.cli.env import collect_environment, render_environment
from hf_megatron.compat.versions import CHECKED, __version__, is_checked_version


def run_env(*options, **variables):
    result = CliRunner().invoke(app, ["env", *options], env=variables)
    assert result.exit_code == 0, result.output
    return result.output


def test_report_names_versions_devices_layout_and_patches():
    text = run_env(HF_MEGATRON_TP_SIZE="2", NCCL_DEBUG="INFO", HF_TOKEN="secret", WANDB_API_KEY="secret")
    assert f"hf_megatron: {__version__}\n" in text
    for library, (first, last) in CHECKED.items():
        assert f"{library}: " in text and f"(tested: {first} to {last})" in text
    assert "gloo" in text and "NCCL_DEBUG: INFO" in text and "entry points: 12" in text
    assert text.endswith("layout of the environment: tp_size=2\n")
    assert "secret" not in text


def test_json_has_the_same_content():
    report = json.loads(run_env("--json", HF_MEGATRON_ZERO_STAGE="nine"))
    assert report["libraries"]["torch"]["tested"] == " to ".join(CHECKED["torch"])
    assert report["layout"].startswith("not valid: HF_MEGATRON_ZERO_STAGE")
    assert report["variables"]["HF_MEGATRON_ZERO_STAGE"] == "nine"


def test_versions_outside_their_range_are_marked():
    assert not is_checked_version("torch", "2.10.1") and not is_checked_version("torch", "9.0.0.dev1")
    report = collect_environment()
    report["libraries"]["torch"] |= {"installed": "9.0.0", "is_tested": False}
    assert "torch: 9.0.0 (tested: " in render_environment(report)
    marked = [line for line in render_environment(report).splitlines() if line.endswith("<- not tested")]
    assert marked[0].startswith("torch: 9.0.0")


def test_patches_that_do_not_apply_are_listed():
    code = (
        "import json, types\n"
        "import hf_megatron, transformers.trainer\n"
        "from hf_megatron.compat.patch_registry import PATCH_REGISTRY, Patch\n"
        "from hf_megatron.cli.env import collect_environment\n"
        "other = types.FunctionType((lambda model: 0).__code__, {'__name__': 'unsloth.patches'}, 'other')\n"
        "transformers.trainer.get_model_param_count = other\n"
        "PATCH_REGISTRY.declare(Patch('transformers.trainer:no_such_function', 'json:dumps', '', ''))\n"
        "PATCH_REGISTRY.declare(Patch('no_such_library:function', 'json:dumps', '', ''))\n"
        "print(json.dumps(collect_environment(check_patches=True)['patches']))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ.copy(), capture_output=True, text=True, check=True, timeout=300
    )
    patches = json.loads(result.stdout.splitlines()[-1])
    assert patches["replaced by another library"] == {"transformers.trainer:get_model_param_count": "unsloth"}
    missing = patches["not in force"]
    assert missing["no_such_library:function"].startswith("ModuleNotFoundError")
    assert "outside the range" in missing["transformers.trainer:no_such_function"]
    # Everything else is in force, but for functions of other versions.
    assert all("not in this version" in missing[name] for name in missing if "no_such" not in name)
    assert patches["in force"] > 200
