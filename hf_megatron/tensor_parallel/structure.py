"""Finds layer stacks, uniform blocks and full-sequence blocks from the structure of a model and its styles.

Nothing here touches a process group: the result consists of names, and can be tested on the meta device.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from .styles import style

# Modules that work on one token at a time, by class name; they can run on a sequence shard.
_POINTWISE_NAME = re.compile(r"norm|dropout|identity|activation|act$", re.IGNORECASE)


@dataclass
class Structure:
    """Modules, by name, at which activations change their layout.

    Attributes:
        uniform: entry block -> its row-parallel linear.
        stack_of: uniform entry block -> the layer stack whose sequence it gathers; none inside full-sequence blocks.
        unsharded: full-sequence block -> its layer stack.
        stacks: names of the layer stacks.
    """

    uniform: dict[str, str] = field(default_factory=dict)
    stack_of: dict[str, str] = field(default_factory=dict)
    unsharded: dict[str, str] = field(default_factory=dict)
    stacks: list[str] = field(default_factory=list)

    def restricted_to(self, names: set[str]) -> "Structure":
        """Restricts the structure to the modules of these names."""
        return Structure(
            {block: row for block, row in self.uniform.items() if block in names and row in names},
            {block: stack for block, stack in self.stack_of.items() if block in names},
            {block: stack for block, stack in self.unsharded.items() if block in names},
            self.stacks,
        )

    def is_pointwise_parameter(self, name: str) -> bool:
        """Returns whether a parameter sees a sequence shard: it is in a stack but in no full-sequence block."""
        if not any(name.startswith(stack + ".") for stack in self.stacks):
            return False
        return not any(name.startswith(block + ".") for block in self.unsharded)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def uniform_row(name: str, module: nn.Module, styles: Mapping[str, str]) -> str | None:
    """Returns the row-parallel linear of a uniform block (only column-parallel linears read its input), or `None`."""
    rows, columns = [], 0
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}"
        child_style = style(styles[full_name]) if full_name in styles else None
        if child_style is not None and child_style.is_row:
            rows.append(full_name)
        elif child_style is not None and child_style.is_column:
            columns += 1
        elif _has_parameters(child) and not (child_style is not None and child_style.works_on_heads):
            return None
    if len(rows) == 1 and columns and all(styles.get(f"{name}.{p}") == "shard_dim_-2" for p in module._parameters):
        return rows[0]
    return None


def _is_pointwise(module: nn.Module) -> bool:
    if type(module).forward is nn.Linear.forward or isinstance(module, nn.Dropout):
        return True
    return bool(_POINTWISE_NAME.search(type(module).__name__)) or not _has_parameters(module)


def _blocks(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the children of a layer that are called, including those in lists and dicts of modules."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}"
        # A ModuleDict subclass with its own forward is called as a module.
        if isinstance(child, nn.ModuleList) or type(child) is nn.ModuleDict:
            yield from _blocks(full_name, child)
        else:
            yield full_name, child


def find_structure(
    model: nn.Module,
    styles: Mapping[str, str],
    *,
    stacks: list[str] | None = None,
    within: nn.Module | None = None,
    regions: Mapping[str, str] | None = None,
    multi_input_blocks: frozenset[str] = frozenset(),
    pointwise_containers: frozenset[str] = frozenset(),
    pointwise: frozenset[str] = frozenset(),
) -> Structure:
    """Builds the `Structure` of a model.

    Args:
        model (`nn.Module`): on any device, also meta.
        styles (`Mapping[str, str]`): concrete module or parameter name -> style name.
        stacks (`list[str]`, *optional*): names of the layer stacks; by default every outermost `nn.ModuleList` that
            contains a split module.
        within (`nn.Module`, *optional*): search for stacks in this module only, instead of the full model.
        regions (`Mapping[str, str]`, *optional*): uniform blocks whose row-parallel linear is not their child.
        multi_input_blocks: blocks whose linears read more than one tensor, as in cross attention.
        pointwise_containers: wrappers inside a layer that only chain pointwise modules and blocks.
        pointwise: modules that work on one token at a time, in addition to those recognized by their class.
    """
    structure = Structure(uniform=dict(regions or {}))
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name and name not in structure.uniform and name not in multi_input_blocks:
            row = uniform_row(name, module, styles)
            if row is not None:
                structure.uniform[name] = row

    split = [name for name in styles if style(styles[name]).splits]
    if stacks is None:
        parts = set(modules.values() if within is None else within.modules())
        # Every list of modules in which something is split; only the outermost of nested ones is a stack.
        lists = [
            name
            for name, module in modules.items()
            if module in parts and isinstance(module, nn.ModuleList)
            if any(other.startswith(name + ".") for other in split)
        ]
        stacks = [name for name in lists if not any(name.startswith(outer + ".") for outer in lists if outer != name)]
    structure.stacks = stacks

    # Every block of a layer is either uniform, pointwise (runs on the sequence shard) or computed on the full sequence.
    for stack in stacks:
        for index, layer in enumerate(modules[stack].children()):
            pending = list(_blocks(f"{stack}.{index}", layer))
            while pending:
                name, block = pending.pop()
                if name in structure.uniform:
                    structure.stack_of[name] = stack
                # Look through a wrapper of pointwise modules and blocks.
                elif name in pointwise_containers:
                    pending.extend(_blocks(name, block))
                elif name not in pointwise and not _is_pointwise(block):
                    structure.unsharded[name] = stack
    return structure
