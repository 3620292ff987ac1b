"""A mixin in front of one module's class: everything else of the module stays."""

from functools import cache
from typing import Any

from torch import nn

from .torch_autograd import follow_forward_of_bases
from .transformers_models import names_of_recorder


@cache
def _mixed_class(mixin: Any, base: Any) -> type[nn.Module]:
    made = type(base.__name__, (mixin, base), names_of_recorder(base))
    follow_forward_of_bases(made)
    return made


def mix_into(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Puts a mixin in front of a module's class; what it keeps stays out of the module's own names."""
    module.__class__ = _mixed_class(mixin, type(module))  # type: ignore[arg-type]
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
