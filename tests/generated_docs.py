"""What documents say of the code, written from the code: `python -m tests.generated_docs`.

docs/design.md    every file's purpose, and why some are longer than others
docs/patches.md   every replaced function and attribute
docs/surface.md   what a training loop may do on which layout, as `python -m tests.habits` recorded it
docs/versions.md  which versions the tests were run with, as `python -m tests.matrix` recorded it
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from hf_megatron.compat.instance_patches import INSTANCE_PATCHES
from hf_megatron.integrations.patch_table import PATCHES
from tests.habits import table
from tests.matrix import table as versions
from tests.structure import ROOT, files

LONGEST = 300
# Why a file is longer than most.
LONG_FILES = {
    "hf_megatron/config.py": "every field with what it means, and what is wrong with its values",
    "hf_megatron/compat/upstream.py": "all private and versioned symbols that are called lie in one file, in sections",
    "hf_megatron/integrations/patch_table.py": "one table: what is replaced, by what, why, and until when",
    "hf_megatron/integrations/transformers/loading.py": "what transformers' loading and saving do anew, one function each",
    "hf_megatron/testing/check.py": "one walk over models, variants and layouts, and what it says of each",
    "hf_megatron/integrations/torch/dtensor_ops.py": "one table of operators and what stands in front of each",
    "hf_megatron/testing/model_overrides.py": "tables of what single types lack by default, or leave unread",
    "hf_megatron/testing/tiny_model.py": "one table of numeric features and how a config switches each on",
    "hf_megatron/tensor_parallel/styles.py": "one table of styles, with a class for each kind",
    "hf_megatron/core/communication/watchdog.py": "one protocol: what a rank tells the others when it fails or goes silent",
    "hf_megatron/integrations/accelerate/accelerator.py": "the only file that reads the environment, and Accelerator's setup",
    "hf_megatron/checkpoint/training_state.py": "writing and reading of weights and optimizers mirror each other",
    "hf_megatron/data_parallel/engine.py": "what a model's parameters have in common: marks, hooks, verdicts",
    "hf_megatron/data_parallel/distributed_optimizer.py": "one optimizer's life between two steps",
    "hf_megatron/checkpoint/transaction.py": "one save from the first byte to the pointer",
}


def library() -> Iterator[tuple[str, str]]:
    """(path, text) of every file of the library."""
    for path in sorted(files().values(), key=lambda path: (path.parent, path.name)):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def purpose(text: str) -> str:
    """The first sentence of a file's docstring."""
    lines = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].split("\n")
    return re.split(r"(?<=[.:]) (?=[A-Z])", " ".join(line.strip() for line in lines))[0].rstrip(":.") + "."


def length(text: str) -> int:
    return len(text.splitlines())


def long_files() -> str:
    rows = [f"| `{path}` | {LONG_FILES[path]} |" for path, text in library() if length(text) > LONGEST]
    return "\n".join([f"Files of more than {LONGEST} lines:\n", "| file | why |", "|---|---|", *rows]) + "\n"


def purposes() -> str:
    parts, folder = [], None
    for path, text in library():
        if str(Path(path).parent) != folder:
            folder = str(Path(path).parent)
            parts += ["", f"**`{folder}/`**", "", "| file | purpose |", "|---|---|"]
        parts.append(f"| `{Path(path).name}` | {purpose(text)} |")
    return "\n".join(parts[1:]) + "\n"


def patches() -> str:
    rows = [
        f"| `{patch.target}` | {'private' if patch.is_private else 'public'} | {patch.stock} | {patch.until} |"
        for patch in PATCHES
    ]
    return "\n".join(["| replaced | upstream calls it | stock | needed until |", "|---|---|---|---|", *rows]) + "\n"


def instance_patches() -> str:
    rows = [f"| `{name}` | {patch.stock} | {patch.until} |" for name, patch in INSTANCE_PATCHES.items()]
    return "\n".join(["| attribute | stock | needed until |", "|---|---|---|", *rows]) + "\n"


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/design.md": {"long files": long_files, "purposes": purposes},
    "docs/patches.md": {"patches": patches, "instance patches": instance_patches},
    "docs/surface.md": {"habits": table},
    "docs/versions.md": {"versions": versions},
}


def generated(page: str) -> str:
    """A page with its generated parts as they should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, part in PARTS[page].items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert begin and end, f"{page} has no place for {name}"
        text = before + begin + part() + end + after
    return text


if __name__ == "__main__":
    for page in PARTS:
        (ROOT / page).write_text(generated(page), encoding="utf-8")
