"""Untracked leaves: trained tensors in the graph of a data-parallel model whose gradients are not reduced.

They are not among the model's parameters. Autograd's graph is searched for them when a backward begins: between the
loss and the models' outputs every time, and inside the models after their first forward or a change of forward hooks.
Graphs of models without data parallelism are not searched.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..compat.graph_leaves import with_leaves
from ..compat.torch_autograd import accumulators, in_backward, leaves_in_graphs, runs_any
from ..errors import UnsupportedError
from .autograd_boundary import LEAVING, STOPPED, UNREDUCED, reject_untracked, walk, walk_up_to
from .engine import DataParallel, all_engines, data_parallel_engines, get_engine
from .fsdp_checks import is_sharded
from .model_parameters import carries_engine


def check_backward(tensors: Any, *, is_partial: bool = False) -> list[Any]:
    """Checks the leaves that a backward from tensors of any shape will reach.

    Args:
        is_partial (`bool`): whether the backward computes the gradients of some leaves only.

    Returns:
        handles to remove after the backward. A large graph is checked when the backward begins: torch tells then, by
        a query per parameter, whether the graph has anything to do with a data-parallel model.

    Raises:
        UnsupportedError: if a trained tensor gets a gradient through a data-parallel model without being one of its
            parameters.
    """
    engines = data_parallel_engines()
    if not engines:
        return []
    is_inner = in_backward() or any(engine.forward_status.is_running for engine in engines)
    looks_inside = any(engine.forward_status.is_unknown for engine in engines)
    if is_inner and not looks_inside:
        # Backwards of recomputed layers (gradient checkpointing) and of a pipeline's schedule.
        return []
    roots = [tensors] if isinstance(tensors, Tensor | GradientEdge) else tensors
    nodes = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    found = walk_up_to(None if is_inner or is_partial else _SMALL, nodes, LEAVING)
    if found is None:
        probe = _Probe(engines, lambda: _check_leaves(engines, *walk(nodes, LEAVING), looks_inside, is_inner))
        return [node.register_prehook(probe) for node in set(nodes) if node is not None]
    _check_leaves(engines, *found, looks_inside, is_inner)
    return []


# Nodes of a graph that cost less to walk than to ask torch about.
_SMALL = 16


class _Probe:
    """Pre-hook of a backward's roots; calls `check` if the backward reaches outputs or parameters of some engines.

    Walking the graph of a plain model costs a third of its backward. The graph of a model's outputs, or of single
    layers that were called, has the accumulators of the model's parameters, or the anchor of the outputs.
    """

    def __init__(self, engines: list[DataParallel], check: Callable[[], None]):
        self.check: Callable[[], None] | None = check
        leaves = with_leaves([leaf for engine in engines for leaf in engine.identities.differentiable()])
        used = leaves_in_graphs(leaves)
        anchors = [anchor for engine in engines if (anchor := engine.output_anchor()) is not None]
        self.nodes = [*anchors, *accumulators(used)]

    def __call__(self, gradients: Any) -> None:
        # The first root that runs decides; the others have nothing to add.
        check, self.check = self.check, None
        if check is not None and runs_any(self.nodes):
            check()


def _check_leaves(
    engines: list[DataParallel], outside: list[Tensor], leaving: list[Any], looks_inside: bool, is_inner: bool
) -> None:
    """Raises `UnsupportedError` for trained leaves of a backward, of any shape, whose gradients are not reduced.

    Args:
        outside (`list[Tensor]`): leaves between the roots and the models' outputs.
        leaving (`list`): the nodes of these outputs.
    """
    inside = [node.next_functions[0][0] for node in leaving]
    leaves, _ = walk(inside, STOPPED) if looks_inside else ([], [])
    tracked = _Own(engines)
    if leaving:
        # The loss of a data-parallel model: a trained tensor between outputs and loss is not reduced.
        reject_untracked(leaf for leaf in outside if leaf not in tracked)
    else:
        leaves = outside
    untracked = [leaf for leaf in leaves if leaf not in tracked]
    owned = len(untracked) < len(leaves)
    if not leaving:
        # A model without data parallelism in the same process may run its own backwards.
        untracked = [leaf for leaf in untracked if tracked.get_engine(leaf) is None]
    is_inside = is_inner and any(
        engine.forward_status.is_running or engine.forward_status.was_differentiated for engine in engines
    )
    if leaving or is_inside or owned:
        reject_untracked(leaf for leaf in untracked if isinstance(leaf, nn.Parameter))
        for leaf in untracked:
            # Loops call `requires_grad_()` on outputs of frozen embeddings without training them. Such tensors are
            # marked, and rejected only if an optimizer holds them.
            setattr(leaf, UNREDUCED, True)
        for engine in engines:
            engine.forward_status.was_differentiated = True


class _Own:
    """Set of leaves that need no further reduction: reduced parameters of some engines, and untrained leaves."""

    def __init__(self, engines: list[DataParallel]):
        self.engines = engines

    @cached_property
    def _unsharded(self) -> set[int]:
        return {id(parameter) for engine in self.engines for parameter in engine.identities.unsharded()}

    @cached_property
    def _parameters(self) -> list[set[int]]:
        return [engine.identities.current() for engine in all_engines()]

    def get_engine(self, leaf: Tensor) -> DataParallel | None:
        """Returns the engine of the model that a leaf of any shape is a parameter of."""
        known = (
            carries_engine(leaf)
            or any(id(leaf) in identities for identities in self._parameters)
            or any(engine.parameters.holds(leaf) for engine in self.engines)
        )
        return get_engine(leaf) if known else None

    def __contains__(self, leaf: Tensor) -> bool:
        # A leaf without entries is an anchor (see `GradientWatch`).
        if not leaf.requires_grad or not leaf.numel():
            return True
        engine = self.get_engine(leaf)
        if engine is not None and engine.mesh.reduces_gradients:
            return is_sharded(leaf) or not engine.state.shards_weights or engine.parameters.is_outside_fsdp(leaf)
        return id(leaf) in self._unsharded


def reject_activation_hook(tensor: Tensor, hook: Any) -> None:
    """Raises `UnsupportedError` for a user hook on a tensor of any shape that depends on data-parallel weights.

    The gradient of an activation carries the factor `dp_size` of the loss, which only averaged gradients lose.
    """
    function = hook.func if isinstance(hook, partial) else hook
    if not str(function.__module__).startswith(_LIBRARIES):
        reject_gradient(tensor, "A hook on the gradient")


def reject_gradient(tensor: Tensor, what: str) -> None:
    """Raises `UnsupportedError` if the gradient of a tensor of any shape that depends on data-parallel weights is read.

    Args:
        what (`str`): what reads the gradient, for the error message.
    """
    engines = data_parallel_engines()
    if not engines:
        return
    leaves, tracked = walk([tensor.grad_fn])[0], _Own(engines)
    if any(leaf.numel() and leaf.requires_grad and leaf in tracked for leaf in leaves):
        raise UnsupportedError(
            f"{what} of an activation of a data parallel model is not supported: its gradient covers the samples of "
            "this rank only and is multiplied by a factor. Remove it, and read or change `parameter.grad` between "
            "backward() and step(), or train with dp_size=1 and cp_size=1."
        )


# Packages whose hooks do not rely on the gradient being the single-process one.
_LIBRARIES = ("torch.distributed.", "torch.utils.", "hf_megatron.", "accelerate.", "transformers.", "trl.")
