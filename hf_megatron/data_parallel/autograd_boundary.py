"""Boundary of a data-parallel model's autograd graph: trained inputs, outputs, and partial backwards.

The reducer averages parameter gradients over the dp ranks, so every rank's loss is multiplied by `dp_size`. Gradients
that are not reduced keep this factor: input gradients, results of `torch.autograd.grad`, and what user hooks see.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.graph_leaves import find_owner, with_leaves
from ..compat.torch_autograd import accumulator, backward_node, is_asked_for, runs_all
from ..errors import UnsupportedError


def reject_hooks(parameters: Iterable[nn.Parameter], num_internal_hooks: int, name_of: Callable) -> None:
    """Raises `UnsupportedError` for a user hook on a parameter's gradient, which is not reduced yet when it runs.

    Args:
        own (`int`): number of hooks that this library has registered on a parameter.
        name_of (`Callable`): parameter -> its name.
    """
    for parameter in parameters:
        after = parameter._post_accumulate_grad_hooks
        if parameter._backward_hooks or (after and len(after) > num_internal_hooks):
            raise UnsupportedError(
                f"A hook on the gradient of {name_of(parameter)} is not supported: with dp_size or cp_size > 1 it sees "
                "the gradient before it is reduced. Remove it, and read or change `parameter.grad` between backward() "
                "and step()."
            )


@dataclass
class ForwardStatus:
    """State of the autograd graph that a model's forwards build.

    Attributes:
        is_running: whether a forward that records gradients is running.
        is_unknown: whether the leaves of the forward's graph still have to be checked.
        was_differentiated: whether a backward since the last forward has checked them.
        forward_hooks: fingerprint of the modules' forward hooks; -1 before the first forward.
    """

    is_running: bool = False
    is_unknown: bool = True
    was_differentiated: bool = False
    forward_hooks: int = -1

    def begin(self, forward_hooks: int) -> None:
        """Starts a forward; its leaves are checked again if the forward hooks changed, which may add leaves."""
        self.is_unknown = self.forward_hooks != forward_hooks or (self.is_unknown and not self.was_differentiated)
        self.forward_hooks = forward_hooks
        self.is_running, self.was_differentiated = True, False


class _OfThisRank(torch.autograd.Function):
    """Identity whose backward divides by the number of ranks, undoing the factor on losses of averaged gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def with_trained_inputs(
    args: tuple, kwargs: dict[str, Any], ranks: int, is_own: Callable[[Tensor], bool]
) -> tuple[tuple, dict[str, Any]] | None:
    """Returns the arguments with trained inputs (of any shape) whose gradients match the single-process run.

    Returns:
        `(args, kwargs)`, or `None` if no input requires a gradient.

    Raises:
        UnsupportedError: if an input was computed from leaves other than the model's parameters, whose gradients are
            not reduced.
    """
    if not any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        return None

    def entering(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if value.is_leaf:
            # The backward divides by `ranks`: an input's gradient is local and is not averaged.
            return _OfThisRank.apply(value, ranks)
        if not all(is_own(leaf) for leaf in walk([value.grad_fn])[0]):
            raise UnsupportedError(
                "An input of a data parallel model was computed from trained tensors that are not its parameters: "
                "their gradients would not be reduced. Make them parameters of the model before "
                "from_pretrained(..., megatron_config=...), or train them with dp_size=1 and cp_size=1."
            )
        return value

    return tuple(map(entering, args)), {name: entering(value) for name, value in kwargs.items()}


class _Watched(torch.autograd.Function):
    # Identity on a model output that calls `check` at the start of its backward.
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, check: Callable[[Any], None], *alongside: Tensor) -> Tensor:
        ctx.check, ctx.alongside = check, len(alongside)
        # Training loops scale a scalar loss in place, which autograd rejects for a view returned by a custom function.
        return value.view_as(value) if value.dim() else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Runs before any gradient is computed inside the model: `check` raises, or prepares the reducer.
        ctx.check(ctx)
        # `anchor` and `alongside` are graph edges only and receive no gradient from here.
        return gradient, None, None, *(None for _ in range(ctx.alongside))


# Autograd nodes at the ends of a model call: its outputs, and inputs whose gradient is rank-local.
LEAVING: tuple[type, ...] = (backward_node(_Watched),)
STOPPED: tuple[type, ...] = (backward_node(_OfThisRank),)
# Attribute of a tensor that received a gradient inside a model without being one of its parameters.
UNREDUCED = "_hf_megatron_unreduced"


def walk(nodes: list[Any], stop_at: tuple[type, ...] = ()) -> tuple[list[Tensor], list[Any]]:
    """Walks autograd's graph from `nodes` towards its leaves.

    Returns:
        the leaves that were reached, of any shape, and the nodes of the classes `stop_at`, where the walk ends.
    """
    found = walk_up_to(None, nodes, stop_at)
    assert found is not None
    return found


def walk_up_to(
    limit: int | None, nodes: list[Any], stop_at: tuple[type, ...] = ()
) -> tuple[list[Tensor], list[Any]] | None:
    """Walks autograd's graph as `walk` does; returns `None` if it has more than `limit` nodes up to `stop_at`."""
    leaves, stopped, left, seen = [], [], list(nodes), {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if limit is not None and len(seen) > limit:
            return None
        if isinstance(node, stop_at):
            stopped.append(node)
        elif isinstance(leaf := getattr(node, "variable", None), Tensor):
            # Only `AccumulateGrad` nodes have `variable`: the leaf that they add the gradient to.
            leaves.append(find_owner(leaf))
        else:
            left += [following for following, _ in node.next_functions]
    return leaves, stopped


def reject_untracked(leaves: Iterable[Tensor]) -> None:
    """Raises `UnsupportedError` for the first of these trained tensors of any shape, which belong to no model."""
    if (leaf := next(iter(leaves), None)) is not None:
        raise UnsupportedError(
            f"A trained tensor of shape {tuple(leaf.shape)} is used with a data parallel model but is not one of its "
            "parameters: its gradient would not be reduced. Make it a parameter of the model before "
            "prepare_optimizer(...), freeze it, or train with dp_size=1 and cp_size=1."
        )


class LateOutput:
    """Lazy model output: placeholder for a tensor that is computed when it is first read.

    Attributes:
        leaving: applied to the computed tensor, of any shape; marks it for backward like the other outputs.
    """

    leaving: Callable[[Tensor], Tensor] | None = None


class GradientWatch:
    """Detects `torch.autograd.grad` calls that differentiate a model's outputs by its parameters.

    An additional leaf, the anchor, is attached to the outputs: `backward()` always reaches it, while
    `torch.autograd.grad` and `backward(inputs=...)` do not, because it is never among their inputs.

    Attributes:
        node: autograd node of the anchor.
    """

    def __init__(self) -> None:
        # Shape `[0]`: it is not a trained tensor.
        self._anchor = torch.zeros(0, requires_grad=True)
        self.node = accumulator(self._anchor)

    def over(
        self, output: Any, begin: Callable[[], None], reject: Callable[[Any], None], alongside: Sequence[Tensor] = ()
    ) -> Any:
        """Returns a model's output, tensors of any shape, whose backward calls `begin` or `reject`.

        Args:
            begin (`Callable`): called by a `backward()` that runs the full graph.
            reject (`Callable`): called with the output's node by a backward that returns some gradients only.
            alongside (`Sequence[Tensor]`): further leaves of any shape to connect to the outputs; they get no gradient
                from here.
        """

        def checked(node: Any) -> None:
            if runs_all(self.node):
                begin()
            else:
                reject(node)

        def watched(value: Any) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                return _Watched.apply(value, self._anchor, checked, *alongside)
            if isinstance(value, LateOutput):
                value.leaving = watched
            return tuple(map(watched, value)) if type(value) is tuple else value

        if isinstance(output, Mapping):
            for name, value in list(output.items()):
                if (seen := watched(value)) is not value:
                    output[name] = seen  # type: ignore[index]
            return output
        return watched(output)


def reject_partial_backward(parameters: Iterable[nn.Parameter], node: Any, *, are_sharded: bool) -> None:
    """Raises `UnsupportedError` in a partial backward that returns gradients of anything but trained inputs.

    Args:
        node: autograd node of the model's output.
        are_sharded (`bool`): whether FSDP2 shards the parameters: the graph does not lead to them then, so the
            gradients that were asked for are not known.
    """
    trained = with_leaves(parameter for parameter in parameters if parameter.requires_grad)
    if are_sharded or any(map(is_asked_for, trained)):
        raise UnsupportedError(
            "torch.autograd.grad with respect to parameters of a data parallel model is not supported: its gradients "
            "would cover the samples of this rank only. Call loss.backward() and read `parameter.grad`."
        )
    # Gradients of trained inputs are rank-local and correct: `_OfThisRank` has removed the factor.
    entering = walk([node], STOPPED)[1]
    if not any(is_asked_for(leaf) for leaf in walk(entering)[0]):
        raise UnsupportedError(
            "torch.autograd.grad with respect to an activation of a data parallel model is not supported: its gradient "
            "would cover the samples of this rank only, times dp_size. Compute gradients of inputs instead, or train "
            "with dp_size=1 and cp_size=1."
        )
