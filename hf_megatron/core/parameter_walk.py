"""Lists of a model's parameters in one loop, for checks that every call makes.

`nn.Module.named_parameters` resumes a generator per level of nesting for each parameter, which costs a call of a deep
model hundreds of Python calls per layer.
"""

from torch import nn


def list_named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by name, as `dict(model.named_parameters())` does."""
    named: dict[str, nn.Parameter] = {}
    visited: set[int] = set()
    listed: set[int] = set()
    # Children are pushed in reverse, so that modules are visited in the order of `named_modules()`.
    stack = [("", model)]
    while stack:
        prefix, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in listed:
                listed.add(id(parameter))
                named[prefix + name] = parameter
        for name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((f"{prefix}{name}.", child))
    return named
