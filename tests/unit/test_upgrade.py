"""Tests of the upgrade tool: fingerprints of upstream code, their comparison, and failures by patch."""

import dataclasses
import subprocess
import sys

import pytest

from tests import upgrade
from tests.helpers.upstream import (
    Fingerprint,
    Snapshot,
    compute_digest,
    find_moved,
    find_target,
    list_compat_names,
    normalize_source,
    take_fingerprint,
)
from tests.structure import ROOT
from tests.upgrade import (
    RECORD,
    compare_snapshots,
    find_culprit,
    group_failures,
    list_requirements,
    main,
    render_diff,
    render_failures,
    render_report,
)

SOURCE = '''
    def function(a):
        """Documented."""

        # A comment.
        return a + 1
'''


def test_fingerprints_ignore_comments_docstrings_and_indentation():
    assert normalize_source(SOURCE) == "def function(a):\nreturn a + 1"
    assert compute_digest(SOURCE) == compute_digest("def function(a):\n    return a + 1\n")
    assert compute_digest(SOURCE) != compute_digest(SOURCE.replace("+ 1", "+ 2"))


def test_targets_are_found_unbound_and_in_closures():
    assert isinstance(find_target("transformers.modeling_utils:PreTrainedModel._from_config"), classmethod)
    assert find_target("torch.nn.utils.clip_grad:clip_grad_norm_.func").__name__ == "clip_grad_norm_"
    with pytest.raises(LookupError, match="no nothing"):
        find_target("torch.nn:Module.nothing")
    assert take_fingerprint("torch.nn:nothing", []).kind == "missing"
    assert take_fingerprint("no_such_library:name", []).kind == "missing"
    assert take_fingerprint("torch.nn:Module", []).digest == ""


def test_record_has_every_name_of_this_version():
    """Fails if a patch or a private symbol was added without `python -m tests.upgrade --record`."""
    from hf_megatron.integrations.patch_table import PATCHES

    recorded = Snapshot.read(RECORD)
    symbols, attributes = list_compat_names()
    assert set(recorded.patches) == {patch.target for patch in PATCHES}
    assert set(recorded.symbols) == set(symbols)
    assert set(recorded.attributes) == set(attributes)


def test_record_matches_installed_code(tmp_path):
    """With the recorded versions, the fingerprints of the installed libraries are the recorded ones."""
    # In a process of its own: all patches are restored there.
    file = tmp_path / "snapshot.json"
    subprocess.run([sys.executable, "-m", "tests.helpers.upstream", str(file)], cwd=ROOT, check=True, timeout=600)
    recorded, installed = Snapshot.read(RECORD), Snapshot.read(file)
    for section, table in recorded.tables().items():
        for name, one in table.items():
            library = name.partition(":")[0].partition(".")[0]
            if recorded.versions[library].partition("+")[0] == installed.versions[library].partition("+")[0]:
                other = installed.tables()[section][name]
                assert (other.kind, other.digest) == (one.kind, one.digest), name


def make_snapshot(**patches):
    versions = {"transformers": "5.23.0", "torch": "2.13.0+cpu"}
    return Snapshot(versions, patches, {}, {}, {"_name": ["compat/a.py"]}, [], {"bert": "1", "gpt2": "1"})


def make_fingerprint(source="a\nb", place="m:f", kind="function"):
    return Fingerprint(["trainer.trainer:init"], kind, place, compute_digest(source) if source else "", source)


def test_changed_moved_and_gone_functions_are_told_apart():
    before = make_snapshot(
        same=make_fingerprint(), edited=make_fingerprint(), gone=make_fingerprint(), moved=make_fingerprint()
    )
    after = make_snapshot(
        same=make_fingerprint(),
        edited=make_fingerprint("a\nc\nd"),
        gone=Fingerprint(["trainer.trainer:init"]),
        moved=make_fingerprint(place="n:f"),
    )
    after = dataclasses.replace(
        after,
        versions={"transformers": "5.24.0", "torch": "2.13.0"},
        copies={"new": make_fingerprint()},
        missing_attributes=["_name"],
        model_types={"bert": "1", "gpt2": "2", "dory": "3"},
    )
    changes = compare_snapshots(before, after)
    assert [(change.kind, change.name) for change in changes] == [
        ("changed", "edited"), ("gone", "gone"), ("moved", "moved"), ("new", "new"), ("gone", "_name"),
    ]  # fmt: skip
    report = render_report(before, after, changes, {"gone": "transformers.other"})
    # A local build is not another version.
    assert "transformers 5.23.0 -> 5.24.0" in report and "torch" not in report
    assert "4 upstream functions and symbols: 1 unchanged, 2 gone, 1 changed, 1 moved, 1 new" in report
    assert "edited [+2 -1]  <- trainer.trainer:init" in report and "[m:f -> n:f]" in report
    assert "gone [same name in transformers.other]" in report and "_name  <- compat/a.py" in report
    assert "new model types: dory" in report
    assert "code of 1 of 2 model types changed" in report and "hf-megatron check gpt2 --layout" in report
    diff = render_diff(before, after, changes)
    assert "=== edited (trainer.trainer:init)" in diff and "-b\n+c\n+d\n" in diff


def test_moved_functions_are_found_by_name():
    assert "accelerate.accelerator" in find_moved("accelerate.utils.other:gather_for_metrics")
    assert find_moved("accelerate.accelerator:no_such_function") == ""


TRACEBACK = """Traceback (most recent call last):
  File "/site-packages/transformers/trainer.py", line 1, in train
  File "/repo/hf_megatron/compat/patch_registry.py", line 2, in training_step[trainer.padded_batches]
  File "/repo/hf_megatron/integrations/trainer/ramp_up.py", line 3, in training_step
TypeError: training_step() got an unexpected keyword argument
"""


def test_failures_are_grouped_by_patch(tmp_path):
    assert find_culprit(TRACEBACK) == "training_step[trainer.padded_batches]"
    without = TRACEBACK.replace("[trainer.padded_batches]", "")
    assert find_culprit(without) == "hf_megatron/integrations/trainer/ramp_up.py: training_step"
    assert find_culprit("AssertionError: 1 != 2") == "no patch"
    report = tmp_path / "report.xml"
    cases = [
        f'<testcase classname="tests.unit.test_a" name="test_{number}"><failure message="m">{text}</failure></testcase>'
        for number, text in enumerate((TRACEBACK, "AssertionError: 1 != 2", TRACEBACK))
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}<testcase name='passed'/></testsuite></testsuites>")
    count, groups = group_failures(report)
    assert count == 4 and [*map(len, groups.values())] == [2, 1]
    text = render_failures(count, groups)
    assert text.startswith("first tier: 4 tests, 3 failed\n  training_step[trainer.padded_batches]: 2\n")
    assert "tests/unit/test_a.py::test_0: TypeError: training_step() got an unexpected keyword argument" in text


def test_pins_replace_ranges():
    requirements = list_requirements({"transformers": "9.9.9", "tokenizers": "1.0"})
    assert "transformers==9.9.9" in requirements and "tokenizers==1.0" in requirements
    assert not any(line.startswith("hf_megatron") or line.startswith("hf-megatron") for line in requirements)
    assert any(line.startswith("pytest") for line in requirements)


@pytest.mark.parametrize(
    "arguments",
    [["transformers"], ["numpy==1.0", "--folder", "x"], ["torch==2.15"], ["torch==abc", "--folder", "x"], []],
)
def test_wrong_arguments_are_rejected(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "expected" in capsys.readouterr().err


def test_release_that_does_not_exist_is_rejected_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(upgrade, "list_releases", lambda library: ["5.24.0", "5.23.0"])
    with pytest.raises(SystemExit):
        main(["transformers==99.0.0", "--folder", str(tmp_path / "folder")])
    assert "transformers==99.0.0: no such release; the newest are 5.24.0, 5.23.0" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
