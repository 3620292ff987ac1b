"""Tests that docs/design/upstream.md states a reason for every private function that is replaced."""

import re

from hf_megatron.integrations.patch_table import PATCHES
from tests.structure import ROOT


def list_documented():
    text = (ROOT / "docs" / "design" / "upstream.md").read_text(encoding="utf-8")
    table = text.partition("## Private functions that are replaced")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([\w.]+)`", row)]


def test_every_private_target_has_a_reason():
    private = {patch.target.partition(":")[2].removesuffix(".func") for patch in PATCHES if patch.is_private}
    documented = list_documented()
    assert sorted(documented) == sorted(set(documented))
    assert set(documented) == private
