"""Finder of test files that execute a source file: `python -m tests.where hf_megatron/core/mesh.py [...]`.

`python -m pytest -n auto --executed=tests/executed.json` records `tests/executed.json` (the first tier; add `-m ""`
for all tests).
"""

import argparse
import json

from tests.helpers.executed import RECORD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+", help="path of a source file, or a part of it")
    sources = parser.parse_args().source
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for part in sources:
        matching = {name: tests for name, tests in record.items() if part in name}
        if not matching:
            parser.error(f"no recorded test executes {part}: expected one of {len(record)} files of {RECORD.name}")
        for name, tests in matching.items():
            print(name, *tests, sep="\n    ")


if __name__ == "__main__":
    main()
