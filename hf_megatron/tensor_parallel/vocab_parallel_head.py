"""The vocabulary head and its lazy logits, from which a model's loss function computes the vocab-parallel loss.

In `model(**batch, labels=...)` the head returns `ShardedLogits`: the head's input and the elementwise functions that
the model applies to its logits (soft-cap, scale, masked tokens). The model's loss function turns it into a scalar
without computing full logits. Any other use gathers the full tensor, with the right gradient, and warns once.
"""

import builtins
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.collectives import bounds, copy_to_ranks, gather_from_ranks
from ..data_parallel.autograd_boundary import LateOutput
from ..data_parallel.fsdp_checks import is_sharded
from ..errors import UnsupportedError
from ..losses.inline_losses import BatchLabels
from ..losses.targets import IGNORE_INDEX, count_targets
from .cross_entropy import CrossEntropyOptions, linear_cross_entropy
from .linear import ColumnParallelLinear
from .local_parameters import local_view, weight_in_use
from .vocab_range import TokensOfRank, filling, require_class_indices, rows_everywhere

_ELEMENTWISE = {torch.tanh, torch.mul, torch.div, torch.true_divide, Tensor.tanh, Tensor.mul, Tensor.div, F.tanh}


class StepsTaken(Shared):
    """Counts the optimizer steps on a model's gradients."""

    def __init__(self) -> None:
        self.number = 0

    def count(self) -> None:
        self.number += 1


class ShardedLogits(LateOutput):
    """Logits `[batch, sequence, vocab]` that are not computed yet.

    Attributes:
        hidden (`Tensor`): the head's input `[..., hidden]`; only the local tokens if `tokens` is given.
        head (`VocabParallelHead`): the head.
        tokens (`TokensOfRank`, *optional*): the tokens of `hidden`, if these are not all.
    """

    def __init__(
        self,
        hidden: Tensor,
        head: "VocabParallelHead",
        functions: tuple[Callable[[Tensor], Tensor], ...] = (),
        tokens: TokensOfRank | None = None,
    ):
        self.hidden = hidden
        self.head = head
        self.functions = functions
        self.tokens = tokens
        # Visible shape without the vocabulary dim.
        self.leading: tuple[int, ...] = tuple(hidden.shape[:-1])
        if tokens is not None:
            self.leading = hidden.shape[0], tokens.length
        self.loss_taken = False
        self.steps = head.steps.number if isinstance(head, VocabParallelHead) else 0

    # Operations that a model may apply to its logits before the loss.
    def _then(self, function: Callable[[Tensor], Tensor]) -> "ShardedLogits | Tensor":
        if self.loss_taken:
            return function(self.gather())
        return self._like(self.hidden, (*self.functions, function))

    def _like(self, hidden: Tensor, functions: tuple[Callable[[Tensor], Tensor], ...]) -> "ShardedLogits":
        logits = ShardedLogits(hidden, self.head, functions, self.tokens)
        logits.leaving, logits.steps = self.leaving, self.steps
        if self.tokens is not None:
            logits.leading = self.leading
        return logits

    def __mul__(self, factor: Any) -> "ShardedLogits | Tensor":
        return self._then(lambda z: z * factor) if isinstance(factor, int | float) else self.gather() * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "ShardedLogits | Tensor":
        return self._then(lambda z: z / divisor) if isinstance(divisor, int | float) else self.gather() / divisor

    def float(self) -> "ShardedLogits":
        # Accelerate casts half-precision outputs, after the loss was computed already.
        logits = self._like(self.hidden, (*self.functions, lambda z: z.float()))
        logits.loss_taken = self.loss_taken
        return logits

    def to(self, *args: Any, **kwargs: Any) -> "ShardedLogits | Tensor":
        return self._then(lambda z: z.to(*args, **kwargs))

    def contiguous(self) -> "ShardedLogits":
        return self

    def view(self, *shape: Any) -> "ShardedLogits | Tensor":
        sizes = shape[0] if isinstance(shape[0], tuple | list) else shape
        # Only views that keep the vocabulary dim stay lazy.
        if self.loss_taken or sizes[-1] != self.head.out_features:
            return self.gather().view(*shape)
        if self.tokens is not None:
            # The sizes count all tokens, `hidden` has the local ones: compute the view's shape on a meta tensor.
            logits = self._like(self.hidden, self.functions)
            logits.leading = tuple(torch.empty(self.leading, device="meta").view(*sizes[:-1]).shape)
            return logits
        return self._like(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]), self.functions)

    reshape = view

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(other, BatchLabels) for other in types):
            # `BatchLabels` hold the divisor of the loss; their own handler requests the sum.
            return NotImplemented
        logits = args[0] if args else None
        if function is F.cross_entropy and isinstance(logits, cls) and _is_token_loss(logits, *args[1:], **kwargs):
            # Models that call `CrossEntropyLoss()` themselves.
            return logits.cross_entropy(
                args[1],
                num_items_in_batch=1 if kwargs.get("reduction") == "sum" else None,
                ignore_index=kwargs.get("ignore_index", IGNORE_INDEX),
                label_smoothing=kwargs.get("label_smoothing", 0.0),
            )
        # Elementwise functions with scalar arguments are recorded and applied to local logits later.
        scalars = not kwargs and all(isinstance(value, int | float) for value in args[1:])
        if isinstance(logits, cls) and function in _ELEMENTWISE and scalars:
            return logits._then(lambda z: function(z, *args[1:]))
        return function(
            *(value.gather() if isinstance(value, cls) else value for value in args),
            **{name: value.gather() if isinstance(value, cls) else value for name, value in kwargs.items()},
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.leading, self.head.out_features))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def transform(self, local_logits: Tensor) -> Tensor:
        """Applies the recorded functions to logits `[..., vocab / tp]`."""
        for function in self.functions:
            local_logits = function(local_logits)
        return local_logits

    def gather(self, *, warn: bool = True) -> Tensor:
        """Gathers the full logits `[batch, sequence, vocab]`, differentiable; collective."""
        if warn:
            warnings.warn(
                "Full logits are gathered from all ranks: reading `outputs.logits` in training, or a loss outside the "
                "model, costs the memory that the vocab-parallel loss saves."
                if self.head.is_split or self.tokens is not None
                else "Full logits are computed: reading `outputs.logits` in training, or a loss outside the model, "
                "costs the memory that `loss_chunk_size` saves.",
                stacklevel=3,
            )
        logits = self._unsharded()
        return logits if self.leaving is None else self.leaving(logits)

    def _unsharded(self) -> Tensor:
        head = self.head
        if self.steps != head.steps.number:
            raise UnsupportedError(
                "`outputs.logits` was read after `optimizer.step()`. Logits are computed lazily, so they would use the "
                "updated weights; read them before the step."
            )
        unit: Any = head.model() if is_sharded(head.weight) else None
        if unit is None:
            return self._gathered()
        # FSDP2 resharded the weight after the forward and does not track this use: unshard it here and for backward.
        unit.unshard()
        try:
            logits = self._gathered()
        finally:
            unit.reshard()
        if logits.requires_grad:
            logits.register_hook(lambda gradient: unit.unshard())
        return logits

    def _gathered(self) -> Tensor:
        # [..., vocab / tp] -> [..., vocab]; with a split sequence [batch, local, vocab] -> [batch, sequence, vocab].
        logits = self.transform(self.head.local_logits(self.hidden))
        if self.head.is_split:
            logits = gather_from_ranks(logits, -1, self.head.out_features, self.head.group)
        return logits if self.tokens is None else self.tokens.join(logits).view(self.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.gather(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.gather()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Sets the logits of tokens that the model masks out, as in `logits[..., tokens] = value`, before the loss."""
        tokens = None if self.loss_taken else rows_everywhere(index, self.shape)
        if tokens is None or not isinstance(value, int | float):
            raise UnsupportedError(
                "Logits of a vocab-parallel head support only `logits[..., tokens] = value` with a number, at all "
                "positions and before the loss. Use `logits.clone()` for other assignments, which gathers the logits."
            )
        first = self.head.vocab_start if isinstance(self.head, VocabParallelHead) else 0
        self.functions = (*self.functions, filling(tokens, value, first))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"ShardedLogits(shape={tuple(self.shape)}, not gathered)"

    def cross_entropy(
        self,
        targets: Tensor,
        *,
        num_items_in_batch: Any,
        ignore_index: int,
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor:
        """Returns the loss, a scalar, against `targets` `[batch, sequence]`; see `linear_cross_entropy`."""
        require_class_indices(targets)
        self.loss_taken = True
        head = self.head
        weight, bias = weight_in_use(head), local_view(head.bias)
        options = CrossEntropyOptions(
            group=head.group if head.is_split else None,
            vocab_start=head.vocab_start,
            vocabulary=head.out_features,
            transform=self.transform if self.functions else None,
            chunk_size=head.loss_chunk_size,
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            with_gradient=torch.is_grad_enabled(),
        )
        # [local tokens, hidden]: tp ranks share them, context parallel ranks hold different ones.
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        targets = targets.to(self.device)
        if self.tokens is None:
            return linear_cross_entropy(hidden, weight, bias, targets.reshape(-1), num_items_in_batch, options)
        if num_items_in_batch is None:
            # Ranks hold different tokens: divide by the global number of targets and sum the ranks' losses.
            num_items_in_batch = count_targets(targets, ignore_index)
        # Targets [batch, sequence] -> [batch, local], matching the local hidden states.
        local_targets = self.tokens.own(targets.reshape(self.hidden.shape[0], self.tokens.length)).reshape(-1)
        return self.tokens.sum(linear_cross_entropy(hidden, weight, bias, local_targets, num_items_in_batch, options))


def _on_gathered(name: str) -> Callable[..., Any]:
    return lambda logits, *args: getattr(logits.gather(), name)(*args)


for _name in ("add", "radd", "sub", "rsub", "neg", "pow", "rtruediv", "matmul", "lt", "le", "gt", "ge", "iter"):
    # Python looks operators up on the class, so `__getattr__` does not cover them.
    setattr(ShardedLogits, f"__{_name}__", _on_gathered(f"__{_name}__"))


def _is_token_loss(logits: ShardedLogits, target: Tensor, weight: Tensor | None = None, **options: Any) -> bool:
    """Returns whether `F.cross_entropy` is called for the mean or sum over class indices, one per token."""
    plain = weight is None and options.get("size_average") is None and options.get("reduce") is None
    rows = len(logits.leading) == 1 and target.dim() == 1 and not target.is_floating_point()
    return plain and rows and options.get("reduction", "mean") in ("mean", "sum")


class VocabParallelHead(ColumnParallelLinear):
    """Output embedding, split over the vocabulary.

    `[batch, sequence, hidden]` -> full logits `[batch, sequence, vocab]`, or `ShardedLogits` while the model's forward
    has labels to compute a loss from.
    """

    model: Callable[[], nn.Module | None]
    loss_is_pending: bool = False
    loss_chunk_size: int | None = None
    steps: "StepsTaken"
    # Selects the tokens of the head's input whose loss this rank computes, with a description of them.
    part_of: Callable[[Tensor], tuple[Tensor, TokensOfRank | None]] | None = None

    @property
    def is_split(self) -> bool:
        """Whether several ranks have shards of the vocabulary."""
        return self.mesh.tp_size > 1

    @property
    def vocab_start(self) -> int:
        return bounds(self.weight.shape[0], self.mesh.tp_size, self.mesh.tp_rank)[0]

    def local_logits(self, hidden: Tensor) -> Tensor:
        """Computes this rank's logits `[..., vocab / tp]` from `[..., hidden]`."""
        # Input replicated; each rank's vocabulary shard yields a partial gradient of it, which is all-reduced.
        return self.matmul(copy_to_ranks(hidden, self.group) if self.is_split else hidden, local_view(self.bias))

    def forward(self, x: Tensor) -> Any:
        tokens = None
        if self.loss_is_pending and self.part_of is not None:
            # [batch, sequence, hidden] -> the tokens whose loss this rank computes, [batch, local, hidden].
            x, tokens = self.part_of(x)
        logits = ShardedLogits(x, self, tokens=tokens)
        return logits if self.loss_is_pending else logits.gather(warn=False)
