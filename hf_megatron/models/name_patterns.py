"""Patterns: dotted names in which `*` stands for one number."""

import re


def generic(name: str) -> str:
    """Turns `model.layers.3.mlp` into `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def lookup(name: str, table):
    """Returns the entry of `table` for a concrete name, or `None`."""
    return table.get(name) if name in table else table.get(generic(name))


def module_name(model, module) -> str:
    """Returns the dotted name of a module inside a model."""
    return next(name for name, other in model.named_modules() if other is module)
