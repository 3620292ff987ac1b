"""Where stock code asks autograd for gradients: backward, and hooks on what is differentiated, also after a cast.

torch imports the targets itself, so nothing of it may be imported before a wrapper is called.
"""

from collections.abc import Callable
from typing import Any

from ..patch_ledger import LEDGER


def backward(original: Callable, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses trained tensors of any shape that get gradients which nobody would reduce, before they do."""
    if LEDGER.models:
        from ..data_parallel.foreign_leaves import check_backward

        check_backward(tensors)
    original(tensors, *args, **kwargs)


def register_hook(original: Callable, self: Any, hook: Callable) -> Any:
    """Refuses hooks on the gradients of activations, of any shape, that would see them with a factor."""
    if LEDGER.models and self.grad_fn is not None:
        from ..data_parallel.foreign_leaves import refuse_activation_hook

        refuse_activation_hook(self, hook)
    return original(self, hook)


def swap_tensors(original: Callable, first: Any, second: Any) -> None:
    """Swaps two tensors, as casts of split weights do, and has autograd call the hooks of both again."""
    original(first, second)
    if LEDGER.models:
        from ..upstream import restore_hooks

        restore_hooks(first)
        restore_hooks(second)
