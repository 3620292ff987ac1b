"""Structural metrics of the library: `python -m tests.structure [--hops]`.

    arrows    upward imports: from a component to one above it in `ORDER`, at any place in a file
    circles   import cycles between files, including type hints and imports inside functions
    hops      frames of this library on the stack when a weight is placed, a gradient reduced, a shard written

A component is a folder or file of `hf_megatron`, or one of the folders `conversion` and `model_cards` next to it.
"""

import argparse
import ast
import builtins
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "hf_megatron"
MAPPED = {"conversion", "model_cards"}

# The highest layer first. Within a layer, components import each other only from left to right, if at all.
ORDER = (
    ("cli", "__main__"),
    ("planner",),
    ("testing",),
    ("__init__", "callbacks"),
    ("integrations",),
    ("conversion", "model_cards"),
    ("checkpoint", "diagnostics", "datasets"),
    ("parallelize", "schedules"),
    ("pipeline_parallel", "context_parallel", "expert_parallel", "tensor_parallel", "data_parallel"),
    ("parallel_state",),
    ("losses",),
    ("models",),
    ("core",),
    ("config",),
    ("compat",),
    ("errors",),
)


def list_files() -> dict[str, Path]:
    """Returns the files of the library by module name."""
    modules = {}
    for folder, prefix in ((PACKAGE, PACKAGE), *((name, f"{PACKAGE}.{name}") for name in sorted(MAPPED))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((prefix, *(part for part in parts if part != "__init__")))] = path
    return modules


def component_name(module: str) -> str:
    """Returns the component of a module: its top-level folder or file in the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def list_public_names() -> dict[str, list[str]]:
    """Returns the modules that define each public class or function name."""
    modules: dict[str, list[str]] = {}
    for module, path in list_files().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(module)
    return modules


def find_imports(module: str, path: Path, known: set[str]) -> Iterator[str]:
    """Yields the modules of the library that a file imports, at any place in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *base.split(".")] if base else above)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                if name in known:
                    yield name
                elif base in known:
                    yield base


def build_import_graph() -> dict[str, set[str]]:
    modules = list_files()
    names = set(modules)
    return {module: set(find_imports(module, path, names)) - {module} for module, path in modules.items()}


def find_upward_imports() -> list[str]:
    """Returns the imports from a component above the importing one."""
    layer = {name: number for number, names in enumerate(ORDER) for name in names}
    place = {name: names.index(name) for names in ORDER for name in names}
    upward = []
    for module, imported in build_import_graph().items():
        for other in imported:
            source, target = component_name(module), component_name(other)
            if (layer[source], place[source]) > (layer[target], place[target]):
                upward.append(f"{module} -> {other}")
    return sorted(upward)


def circles() -> list[list[str]]:
    """Returns groups of files with import cycles (Tarjan's strongly connected components)."""
    edges, index, low, stack, cycles = build_import_graph(), {}, {}, [], []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            group = []
            while module not in group:
                group.append(stack.pop())
            if len(group) > 1:
                cycles.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for module in edges:
        if module not in index:
            visit(module)
    return sorted(cycles)


def list_library_frames() -> list[str]:
    """Returns the frames of this library on the stack, outermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGE) and not name.startswith(f"{PACKAGE}.testing"):
            frames.append(f"{name.removeprefix(PACKAGE + '.')}:{frame.f_code.co_name}")
        frame = frame.f_back
    return frames[::-1]


def _record_first_call(found: dict[str, list[str]], name: str, function):
    """Wraps `function` to record the frames of its first call."""

    def wrapper(*args, **kwargs):
        found.setdefault(name, list_library_frames())
        return function(*args, **kwargs)

    return wrapper


def _record_frames_on_rank(directory: str) -> dict[str, list[str]]:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_megatron import MegatronConfig, parallelize

    frames: dict[str, list[str]] = {}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, **small)
    if dist.get_rank() == 0:
        LlamaForCausalLM(config).save_pretrained(directory)
    dist.barrier()
    placing = parallelize.distribute_tensor
    parallelize.distribute_tensor = _record_first_call(frames, "from_pretrained -> a placed weight", placing)
    LlamaForCausalLM.from_pretrained(directory, megatron_config=MegatronConfig(tp_size=2))

    model = LlamaForCausalLM.from_pretrained(directory, megatron_config=MegatronConfig(dp_size=2))
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.arange(8).view(1, 8)
    loss = model(input_ids=ids, labels=ids).loss
    sending = dist.isend
    dist.isend = _record_first_call(frames, "loss.backward() -> a gradient on its way", sending)
    accelerator.backward(loss)
    dist.isend = _record_first_call(frames, "optimizer.step() -> a weight on its way", sending)
    optimizer.step()
    dist.isend = sending
    opening = builtins.open

    def open_and_record(file, mode="r", *args, **kwargs):
        if "x" in mode and str(file).endswith(".safetensors"):
            frames.setdefault("save_state() -> a shard on disk", list_library_frames())
        return opening(file, mode, *args, **kwargs)

    builtins.open = open_and_record
    accelerator.save_state(str(Path(directory) / "state"))
    builtins.open = opening
    return frames


def hops() -> dict[str, list[str]]:
    """Returns the frames of this library on the stack at each traced operation."""
    from hf_megatron.core.fork_harness import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(_record_frames_on_rank, 2, directory)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", action="store_true", help="train and save a tiny model on two ranks to count frames")
    args = parser.parse_args()
    metrics: dict[str, object] = {"upward arrows": find_upward_imports(), "circles": circles()}
    if args.hops:
        metrics["hops"] = {name: {"frames": len(frames), "way": frames} for name, frames in hops().items()}
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
