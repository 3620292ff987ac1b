"""Trained tensors behind or inside a data parallel model that are not its parameters: nobody reduces their gradients.

They are looked for in autograd's graph when a backward begins: between the loss and what models returned every time,
inside of models after their first forward, and when forward hooks have come.
"""

from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..compat.torch_autograd import in_backward
from ..compat.torch_fsdp import unsharded_parameters
from ..errors import UnsupportedError
from .autograd_boundary import LEAVING, STOPPED, UNREDUCED, reject_untracked, walk
from .engine import DataParallel, all_engines, data_parallel_engines, get_engine
from .fsdp_checks import is_sharded
from .model_parameters import carries_engine


def check_backward(tensors: Any) -> None:
    """Looks at what a backward from tensors of any shape will reach.

    Raises:
        UnsupportedError: a trained tensor gets a gradient through a data parallel model, and is none of its parameters.
    """
    engines = data_parallel_engines()
    if not engines:
        return
    is_inner = in_backward() or any(engine.forward_status.is_running for engine in engines)
    looks_inside = any(engine.forward_status.is_unknown for engine in engines)
    if is_inner and not looks_inside:
        # Recomputed layers, and a pipeline's schedule.
        return
    roots = [tensors] if isinstance(tensors, Tensor | GradientEdge) else tensors
    outside, leaving = walk([root.grad_fn if isinstance(root, Tensor) else root.node for root in roots], LEAVING)
    inside = [node.next_functions[0][0] for node in leaving]
    leaves, _ = walk(inside, STOPPED) if looks_inside else ([], [])
    tracked = _Own(engines)
    if leaving:
        reject_untracked(leaf for leaf in outside if leaf not in tracked)
    else:
        leaves = outside
    untracked = [leaf for leaf in leaves if leaf not in tracked]
    owned = len(untracked) < len(leaves)
    if not leaving:
        # Another model of this process, without replicas, may run its own backwards.
        untracked = [leaf for leaf in untracked if tracked.get_engine(leaf) is None]
    is_inside = is_inner and any(
        engine.forward_status.is_running or engine.forward_status.was_differentiated for engine in engines
    )
    if leaving or is_inside or owned:
        reject_untracked(leaf for leaf in untracked if isinstance(leaf, nn.Parameter))
        for leaf in untracked:
            # Loops ask outputs of frozen embeddings for a gradient, which nobody trains: an optimizer tells.
            setattr(leaf, UNREDUCED, True)
        for engine in engines:
            engine.forward_status.was_differentiated = True


class _Own:
    """Tells the leaves that some engines' models are trained by, or that nobody trains."""

    def __init__(self, engines: list[DataParallel]):
        self.engines = engines

    @cached_property
    def _unsharded(self) -> set[int]:
        sharded = (engine.model for engine in self.engines if engine.state.shards_weights)
        return {id(parameter) for model in sharded for parameter in unsharded_parameters(model)}

    @cached_property
    def _parameters(self) -> set[int]:
        return {id(parameter) for engine in all_engines() for parameter in engine.model.parameters()}

    def get_engine(self, leaf: Tensor) -> DataParallel | None:
        """Returns the engine of the model that a leaf of any shape is a parameter of."""
        # Looked up once for all leaves: one by one, the backward of a plain model beside a data parallel one would take
        # its leaves times the other's parameters.
        known = (
            carries_engine(leaf)
            or id(leaf) in self._parameters
            or any(engine.parameters.holds(leaf) for engine in self.engines)
        )
        return get_engine(leaf) if known else None

    def __contains__(self, leaf: Tensor) -> bool:
        # A leaf without entries tells a backward what it is asked for.
        if not leaf.requires_grad or not leaf.numel():
            return True
        engine = self.get_engine(leaf)
        if engine is not None and engine.mesh.reduces_gradients:
            return is_sharded(leaf) or not engine.state.shards_weights or engine.parameters.is_outside_fsdp(leaf)
        return id(leaf) in self._unsharded


def reject_activation_hook(tensor: Tensor, hook: Any) -> None:
    """Raises `UnsupportedError` for a hook of the loop's on a tensor of any shape computed with data parallel weights.

    Its gradient carries the factor that losses are multiplied by, because those of parameters are averaged.
    """
    function = hook.func if isinstance(hook, partial) else hook
    if not str(function.__module__).startswith(_LIBRARIES):
        reject_gradient(tensor, "A hook on the gradient")


def reject_gradient(tensor: Tensor, what: str) -> None:
    """Raises `UnsupportedError` for a look at the gradient of a tensor of any shape made with data parallel weights."""
    engines = data_parallel_engines()
    if not engines:
        return
    leaves, tracked = walk([tensor.grad_fn])[0], _Own(engines)
    if any(leaf.numel() and leaf.requires_grad and leaf in tracked for leaf in leaves):
        raise UnsupportedError(
            f"{what} of an activation of a data parallel model: it would be that of this rank's part of a batch, with "
            "a factor. Remove it, and change or read `parameter.grad` between backward() and step(), or train with "
            "dp_size=1 and cp_size=1."
        )


# Whose hooks take no gradient for one of one process.
_LIBRARIES = ("torch.distributed.", "torch.utils.", "hf_megatron.", "accelerate.", "transformers.", "trl.")
