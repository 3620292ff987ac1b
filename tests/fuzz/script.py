"""Generator of reproduction scripts: single files that need torch, transformers and this library."""

import ast
import inspect
import pprint
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tests.fuzz import generators, loop, pattern
from tests.fuzz.cases import count_ranks
from tests.fuzz.patterns import get_patterns

_PLACES = (
    "made",
    "prepared",
    "forward",
    "backward",
    "before_step",
    "step",
    "clear",
    "after_step",
    "ended",
)
_BEGIN = '''"""{judgment}: {worst}

Run both, in this order:

    {first}
    {second}
"""

import os
import pprint
import sys
import copy
import gc

from torch.nn.utils import clip_grad_norm_ as early_clip_grad_norm_

'''
_END = """
def say(*words: str) -> None:
    # One write: ranks that share an output, unbuffered, write between the words of a `print`.
    sys.stdout.write(" ".join(words) + "\\n")
    sys.stdout.flush()


def main() -> None:
    on_ranks = "RANK" in os.environ
    folder = "fuzz_case"
    os.makedirs(folder, exist_ok=True)
    case, start = dict(CASE), folder + "/start"
    if on_ranks:
        dist.init_process_group("gloo")
    elif case["way"] != "from_config":
        draw_model(case, LOOP_PATTERNS, start)
    case["norm"] = NORM
    result = run_loop(case, LOOP_PATTERNS, start, folder + ("/ranks" if on_ranks else "/one"), on_ranks)
    rank = dist.get_rank() if on_ranks else 0
    result.pop("marks", None)
    say(f"rank {rank}:" if on_ranks else "one process:", pprint.pformat(result))
    if SECOND == on_ranks and rank == 0 and os.path.exists(folder + "/one") and os.path.exists(folder + "/ranks"):
        from safetensors.torch import load_file

        one, ranks = (load_file(f"{folder}/{name}/model.safetensors") for name in ("one", "ranks"))
        apart = {name: float((ranks[name] - one[name]).abs().max()) for name in one if name in ranks}
        say("largest differences of weights:", str(sorted(apart.items(), key=lambda item: -item[1])[:5]))


if __name__ == "__main__":
    main()
"""


def reproduction(case: Mapping[str, Any], result: Mapping[str, Any], norm: float = 1.0) -> str:
    """Returns the source of a script that runs a case on ranks and in a single process.

    Args:
        case: case, shrunk or not.
        result: its `judgment` and `worst`, for the docstring.
        norm (`float`): gradient norm of the plain loss, rounded to a power of two.
    """
    one, ranks = "python case.py", f"torchrun --nproc_per_node {count_ranks(case['layout'])} case.py"
    # A model created on the ranks is available to the single process only afterwards.
    ranks_first = case["way"] == "from_config"
    first, second = (ranks, one) if ranks_first else (one, ranks)
    worst = " ".join(str(result["worst"]).split()).replace("\\", "/").replace('"""', "'")
    text = _BEGIN.format(judgment=result["judgment"], worst=worst, first=first, second=second)
    text += _join_modules(pattern, generators, loop)
    functions: dict[str, str] = {}
    constructors = [
        _format_constructor(loop_pattern, functions) for loop_pattern in get_patterns(case["loop_patterns"])
    ]
    text += "".join("\n\n" + source for source in functions.values())
    text += f"\n\nLOOP_PATTERNS = [{', '.join(constructors)}]\n"
    text += f"NORM = {norm}\nSECOND = {not ranks_first}\nCASE = {pprint.pformat(dict(case), width=110)}\n\n"
    return text + _END


def _join_modules(*modules: ModuleType) -> str:
    """Joins the sources of modules into one file, with their external imports first and without duplicates."""
    imports: dict[str, None] = {}
    bodies = []
    for module in modules:
        text = inspect.getsource(module)
        nodes = ast.parse(text).body
        for node in nodes:
            # The modules of the fuzzer are inlined.
            is_own = isinstance(node, ast.ImportFrom) and str(node.module).startswith("tests.")
            if isinstance(node, ast.Import | ast.ImportFrom) and not is_own:
                imports[ast.unparse(node)] = None
        first = next(node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef))
        line = min([first.lineno, *(decorator.lineno for decorator in first.decorator_list)])
        bodies.append("".join(text.splitlines(keepends=True)[line - 1 :]))
    return "\n".join(imports) + "\n\n\n" + "\n\n".join(bodies)


def _format_constructor(given: pattern.LoopPattern, functions: dict[str, str]) -> str:
    words = [repr(given.name), repr(given.description)]
    for place in _PLACES:
        function = getattr(given, place)
        if function is not None:
            _collect(function, functions)
            words.append(f"{place}={function.__name__}")
    words += [f"changes={dict(given.changes)!r}", f"batch={dict(given.batch)!r}"]
    return f"LoopPattern({', '.join(words)}, random={given.random}, local={given.local})"


def _collect(function: Callable[..., Any], functions: dict[str, str]) -> None:
    """Collects the source of a function and of the functions of its module that it calls."""
    plain = inspect.unwrap(function)
    if plain.__name__ in functions:
        return
    for name in plain.__code__.co_names:
        other = plain.__globals__.get(name)
        if inspect.isfunction(other) and other.__module__ == plain.__module__:
            _collect(other, functions)
    functions[plain.__name__] = inspect.getsource(plain)
