"""Where autograd's graph of a data parallel model begins and ends: trained inputs, and who asks for gradients.

Gradients of parameters are averages over the dp ranks, which every rank's loss carries as a factor. Nothing averages
the gradient of an input, and nothing reduces what `torch.autograd.grad` returns or a hook of the loop's sees.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import accumulator, backward_node, is_asked_for, runs_all
from ..errors import UnsupportedError


def reject_hooks(parameters: Iterable[nn.Parameter], num_internal_hooks: int, name_of: Callable) -> None:
    """Raises `UnsupportedError` for a hook of the loop's on a parameter's gradient, which is not complete there.

    Args:
        num_internal_hooks (`int`): hooks that this library has on a parameter.
        name_of (`Callable`): parameter -> its name.
    """
    for parameter in parameters:
        after = parameter._post_accumulate_grad_hooks
        if parameter._backward_hooks or (after and len(after) > num_internal_hooks):
            raise UnsupportedError(
                f"A hook on the gradient of {name_of(parameter)}: with dp_size or cp_size > 1 hooks see a part "
                "of the gradient. Remove it, and change or read `parameter.grad` between backward() and step()."
            )


@dataclass
class ForwardStatus:
    """What is known of the autograd graph that a model's forwards build.

    Attributes:
        is_running: inside a forward that records gradients.
        is_unknown: the leaves of such a forward's graph were not checked yet.
        was_differentiated: a backward since the last forward checked them.
        forward_hooks: fingerprint of the modules' forward hooks; -1 before the first forward.
    """

    is_running: bool = False
    is_unknown: bool = True
    was_differentiated: bool = False
    forward_hooks: int = -1

    def begin(self, forward_hooks: int) -> None:
        """Starts a forward; new forward hooks may have brought new leaves."""
        self.is_unknown = self.forward_hooks != forward_hooks or (self.is_unknown and not self.was_differentiated)
        self.forward_hooks = forward_hooks
        self.is_running, self.was_differentiated = True, False


class _OfThisRank(torch.autograd.Function):
    """Identity whose backward takes out what losses are multiplied by because gradients are averaged over ranks."""

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
    """Gives input tensors that require a gradient that of one process; `None` where there are none.

    Raises:
        UnsupportedError: an input was computed from leaves that are not the model's parameters: nobody reduces them.
    """
    if not any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        return None

    def entering(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        if value.is_leaf:
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
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, check: Callable[[Any], None], *alongside: Tensor) -> Tensor:
        ctx.check, ctx.alongside = check, len(alongside)
        # Loops scale losses in place, which a view of a node of ours would not take.
        return value.view_as(value) if value.dim() else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.check(ctx)
        return gradient, None, None, *(None for _ in range(ctx.alongside))


# Where the graph of what a model computed begins: what it returned, and inputs whose gradient is of this rank alone.
LEAVING: tuple[type, ...] = (backward_node(_Watched),)
STOPPED: tuple[type, ...] = (backward_node(_OfThisRank),)
# Attribute of a tensor that got a gradient inside a model, and is none of its parameters.
UNREDUCED = "_hf_megatron_unreduced"


def walk(nodes: list[Any], stop_at: tuple[type, ...] = ()) -> tuple[list[Tensor], list[Any]]:
    """Lists the leaves behind nodes of autograd's graph, and the nodes of some classes, which nothing behind is of."""
    leaves, stopped, left, seen = [], [], list(nodes), {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, stop_at):
            stopped.append(node)
        elif isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
        else:
            left += [following for following, _ in node.next_functions]
    return leaves, stopped


def reject_untracked(leaves: Iterable[Tensor]) -> None:
    """Raises `UnsupportedError` if there is a trained tensor, of any shape, that is no parameter of a model's."""
    if (leaf := next(iter(leaves), None)) is not None:
        raise UnsupportedError(
            f"A trained tensor of shape {tuple(leaf.shape)} beside, behind or inside a data parallel model is not one "
            "of its parameters: its gradient would not be reduced. Make it a parameter of the model before "
            "prepare_optimizer(...), freeze it, or train with dp_size=1."
        )


class LateOutput:
    """What a model returns in place of a tensor that is computed once somebody reads it.

    Attributes:
        leaving: what that tensor, of any shape, passes then, as those do that a model returns.
    """

    leaving: Callable[[Tensor], Tensor] | None = None


class GradientWatch:
    """Notices a `torch.autograd.grad` of a model's outputs by its parameters.

    A leaf that nobody asks for hangs beside the outputs: autograd reaches it in every `backward()`, and not otherwise.
    """

    def __init__(self) -> None:
        # Without entries: nobody trains it.
        self._anchor = torch.zeros(0, requires_grad=True)
        self._node = accumulator(self._anchor)

    def over(
        self, output: Any, begin: Callable[[], None], reject: Callable[[Any], None], alongside: Sequence[Tensor] = ()
    ) -> Any:
        """Returns what a model returned, tensors of any shape, whose backward calls one of two functions.

        Args:
            begin (`Callable`): of a backward that runs all of the graph.
            reject (`Callable`): of one that somebody asks for some gradients, with the node where the graph begins.
            alongside (`Sequence[Tensor]`): leaves of any shape that lead here too, and get no gradient from here.
        """

        def checked(node: Any) -> None:
            if runs_all(self._node):
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
    """Raises `UnsupportedError` inside a backward that hands out gradients of others than trained inputs.

    Args:
        node: where the model's graph begins.
    """
    if are_sharded or any(is_asked_for(parameter) for parameter in parameters if parameter.requires_grad):
        raise UnsupportedError(
            "torch.autograd.grad by parameters of a data parallel model: its gradients would be those of this rank's "
            "rows. Call loss.backward() and read `parameter.grad`."
        )
    entering = walk([node], STOPPED)[1]
    if not any(is_asked_for(leaf) for leaf in walk(entering)[0]):
        raise UnsupportedError(
            "torch.autograd.grad by an activation of a data parallel model: its gradient would be that of this rank's "
            "rows, times dp_size. Ask for gradients of inputs, or train with dp_size=1."
        )
