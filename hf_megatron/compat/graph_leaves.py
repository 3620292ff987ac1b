"""Plain autograd leaves for the DTensor parameters that forwards read locally (private symbols of DTensor).

A graph that leads to a DTensor makes autograd build one from each gradient and dispatch its accumulation: 40 us of host
time per parameter and backward. Forwards read a plain leaf that shares the local tensor's memory instead. Autograd
accumulates into it in C++, and a hook of the leaf moves the gradient to the parameter's `.grad`.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .torch_dtensor import dtensor_from_local, dtensor_local_view

# Attribute of a parameter: its leaf.
_LEAF = "_hf_megatron_leaf"
# Attribute of a parameter and of all of its leaves, which graphs may hold: a weak reference to the parameter.
_OWNER = "_hf_megatron_owner"
# Attribute of a parameter: its version counter when its edits were last counted on the local tensor.
_VERSION = "_hf_megatron_version"


class _Reference:
    """Attribute value that copies and pickles leave out: a copied parameter gets a leaf of its own."""

    def __init__(self, value: Any = None):
        self.value = value

    def __deepcopy__(self, memo: dict) -> "_Reference":
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()


class _LeafReference(_Reference):
    """A parameter's leaf, with the local tensor and the address whose memory it shares."""

    def __init__(self, value: Tensor | None = None, local: Tensor | None = None):
        super().__init__(value)
        self.local, self.address = local, None if local is None else local.data_ptr()


def read_local(parameter: DTensor) -> Tensor:
    """Returns the local tensor, of any shape, that a forward differentiates.

    It is a plain leaf for a trained parameter. Parameters with gradient hooks, quantized ones, and tensors that were
    computed from others get a view whose gradient reaches them through autograd.
    """
    if torch.compiler.is_dynamo_compiling():
        return dtensor_local_view(parameter)
    attributes = parameter.__dict__
    reference = attributes.get(_LEAF)
    # Forwards get no further in most reads. Few attributes of the DTensor are read here: each costs 130 ns.
    if (
        reference is not None
        and reference.local is parameter._local_tensor
        and reference.local.data_ptr() == reference.address
        and attributes.get(_VERSION) == parameter._version
        and parameter.requires_grad
        and not parameter._backward_hooks
    ):
        return reference.value
    return _read_changed(parameter)


def _read_changed(parameter: DTensor) -> Tensor:
    """Does the work of `read_local` for a parameter of any shape that was not read before or has changed since."""
    # An edit with a differentiable value makes a parameter a result of other tensors.
    if not parameter.is_leaf or parameter._backward_hooks:
        return dtensor_local_view(parameter)
    local = parameter._local_tensor
    if not parameter.requires_grad or torch.is_inference_mode_enabled():
        return local
    reference = parameter.__dict__.get(_LEAF)
    # `.data = ...`, casts and moves replace the local tensor, or its memory.
    if reference is None or reference.local is not local or reference.address != local.data_ptr():
        if type(local) is not Tensor:
            return dtensor_local_view(parameter)
        reference = _make_leaf(parameter, local)
    # An edit inside of the forward, by a hook, precedes what autograd saves from here on.
    sync_versions([parameter])
    return reference.value


def sync_versions(parameters: Iterable[Any]) -> None:
    """Counts edits of DTensors, of any shape, since the last call on their local tensors.

    A DTensor counts edits on itself, while autograd saves its local tensor.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            attributes, version = parameter.__dict__, parameter._version
            if attributes.setdefault(_VERSION, version) != version:
                attributes[_VERSION] = version
                torch.autograd.graph.increment_version(parameter._local_tensor)


def _make_leaf(parameter: DTensor, local: Tensor) -> _LeafReference:
    # Shares the memory and the version counter, so that autograd sees edits of the local tensor.
    leaf = local.detach().requires_grad_()
    owner = parameter.__dict__.get(_OWNER)
    if owner is None or owner.value is None:
        # Weak, as autograd keeps the hook where the garbage collector does not look.
        owner = parameter.__dict__[_OWNER] = _Reference(weakref.ref(parameter))
    setattr(leaf, _OWNER, owner)
    leaf.register_post_accumulate_grad_hook(partial(_on_accumulated, owner))
    reference = parameter.__dict__[_LEAF] = _LeafReference(leaf, local)
    return reference


def _on_accumulated(owner: _Reference, leaf: Tensor) -> None:
    """Moves the gradient that autograd has accumulated, of any shape, to the parameter, and calls its hooks."""
    gradient, leaf.grad = leaf.grad, None
    parameter = owner.value()
    # A module's parameter may have been replaced since the forward, or frozen: then autograd discards its gradient.
    if parameter is None or gradient is None or not parameter.requires_grad:
        return
    _add_gradient(parameter, gradient)
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        for hook in tuple(hooks.values()):
            hook(parameter)


def _add_gradient(parameter: DTensor, gradient: Tensor) -> None:
    wrapped: Tensor
    if gradient.requires_grad:
        wrapped = dtensor_from_local(gradient, parameter)
    else:
        # Without `__init__`, which only serves torch.export.
        wrapped = DTensor.__new__(DTensor, gradient, parameter._spec, requires_grad=False)
    # Hooks that were registered after the forward.
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(wrapped)
        wrapped = wrapped if changed is None else changed
    present = parameter.grad
    if present is None:
        parameter.grad = wrapped
    elif torch.is_grad_enabled():
        # As autograd does with `create_graph=True`.
        parameter.grad = present + wrapped
    else:
        present.add_(wrapped)


def find_leaf(parameter: Any) -> Tensor | None:
    """Returns the leaf, of any shape, that graphs contain instead of a parameter; `None` if it has none."""
    reference = parameter.__dict__.get(_LEAF) if isinstance(parameter, DTensor) else None
    return None if reference is None else reference.value


@contextmanager
def released_leaf(parameter: Any) -> Iterator[None]:
    """Drops a parameter's leaf, and inside the context the weak reference, which `torch.utils.swap_tensors` rejects.

    Leaves that graphs hold deliver their gradients to the same parameter afterwards.
    """
    attributes = parameter.__dict__ if isinstance(parameter, DTensor) else {}
    attributes.pop(_LEAF, None)
    owner = attributes.pop(_OWNER, None)
    if owner is None:
        yield
        return
    owner.value = None
    try:
        yield
    finally:
        owner.value = weakref.ref(parameter)
        # The tensors' attributes were swapped, too.
        parameter.__dict__[_OWNER] = owner


def with_leaves(parameters: Iterable[Any]) -> list[Any]:
    """Returns parameters, of any shape, followed by their leaves."""
    listed = list(parameters)
    # No call per parameter: backwards of plain models ask this for all parallelized models beside them.
    references = [value.__dict__.get(_LEAF) for value in listed if isinstance(value, DTensor)]
    # References of copied parameters are empty until their first forward.
    return listed + [leaf for reference in references if reference and (leaf := reference.value) is not None]


def find_owner(leaf: Tensor) -> Tensor:
    """Returns the parameter that a leaf, of any shape, belongs to; other tensors unchanged."""
    reference = leaf.__dict__.get(_OWNER)
    owner = None if reference is None or reference.value is None else reference.value()
    return leaf if owner is None else owner


def collect_leaf_gradients(parameters: Iterable[Tensor]) -> None:
    """Adds gradients that were written into leaves without autograd to the parameters' `.grad`, without their hooks."""
    for parameter in parameters:
        leaf = find_leaf(parameter)
        if leaf is not None and leaf.grad is not None:
            gradient, leaf.grad = leaf.grad, None
            _add_gradient(parameter, gradient)  # type: ignore[arg-type]


class LeafInputs:
    """Inputs of `torch.autograd.grad`, followed by the leaves of the parameters among them.

    Args:
        inputs (`Sequence`): tensors of any shape, or graph edges.
    """

    def __init__(self, inputs: Sequence[Any]):
        self.parameters = list(inputs)
        leaves = [find_leaf(value) for value in inputs]
        self.positions = [index for index, leaf in enumerate(leaves) if leaf is not None]
        self.inputs = (*inputs, *(leaf for leaf in leaves if leaf is not None))

    def merge(self, gradients: Sequence[Tensor | None], *, allow_unused: bool) -> tuple[Tensor | None, ...]:
        """Returns one gradient per original input, of its shape, from those of `inputs`.

        Raises:
            RuntimeError: torch's error for an input that the graph does not contain, unless `allow_unused`.
        """
        count = len(self.parameters)
        merged = list(gradients[:count])
        for index, gradient in zip(self.positions, gradients[count:], strict=True):
            if gradient is not None:
                wrapped, present = dtensor_from_local(gradient, self.parameters[index]), merged[index]
                merged[index] = wrapped if present is None else present + wrapped
        if not allow_unused and any(gradient is None for gradient in merged):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        return tuple(merged)
