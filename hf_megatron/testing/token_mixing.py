"""Detection of modules that mix tokens outside transformers' attention functions, by changing one token.

Attention is replaced by a function in which each token sees only its own value. Then one token is changed: a module
whose outputs at other tokens change, although its inputs there do not, mixes tokens. Context parallelism must run such
modules on the full sequence, so each has to be known to it (`ModelSpec.cp.full_sequence_blocks`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.transformers_models import attention_replaced
from ..context_parallel.head_parallel_blocks import heads_to_share
from ..models.layers import find_full_sequence_blocks, find_layers
from ..models.spec import ModelSpec
from ..parallel_state import ParallelState

# Relative. A matrix product over several tokens may round differently when one of them changes.
_TOLERANCE = 1e-4


def _own_value(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of `[batch, heads, tokens, width]` in which each token sees only itself."""
    groups = query.shape[1] // value.shape[1]
    seen = value[:, :, -query.shape[2] :].repeat_interleave(groups, dim=1)
    return seen.transpose(1, 2).contiguous(), None


class _Calls:
    """Recorder of each module's first input and output in a forward, by module name."""

    def __init__(self, rows: int, tokens: int):
        self.rows, self.tokens = rows, tokens
        self.given: dict[str, Tensor] = {}
        self.returned: dict[str, Tensor] = {}

    def note(self, name: str, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        returned = output[0] if isinstance(output, tuple) and output else output
        for store, value in ((self.given, inputs), (self.returned, returned)):
            if (by_token := self._by_token(value)) is not None:
                # Cloned because some layers add to a module's output in place. Only the first call is kept.
                store.setdefault(name, by_token.clone())

    def _by_token(self, value: Any) -> Tensor | None:
        """Returns the value as `[batch, tokens, features]`, or `None` if it has no entry per token."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        if value.dim() > 2 and value.shape[:2] == (self.rows, self.tokens):
            return value.detach().flatten(2)
        if value.dim() > 1 and value.shape[0] == self.rows * self.tokens:
            return value.detach().view(self.rows, self.tokens, -1)
        return None


def find_token_mixing(model: nn.Module, batch: Mapping[str, Any], layers: str) -> frozenset[str]:
    """Returns the names of the innermost modules in a model's layers that mix tokens outside attention functions.

    Args:
        model (`nn.Module`): an unsharded model in a single process.
        batch (`Mapping`): `input_ids` `[batch, sequence]` or `[batch, codebooks, sequence]`, and further arguments.
        layers (`str`): name of the module list of the layers.
    """
    ids: Tensor = batch["input_ids"]
    rows, tokens = len(ids), ids.shape[-1]
    changed, place = ids.clone(), tokens // 2
    changed[..., place] = (ids[..., place] + 1) % int(ids.max() + 1)
    first, second = _Calls(rows, tokens), _Calls(rows, tokens)
    inputs: dict[str, Tensor] = {}
    modules = {name: module for name, module in model.named_modules() if name.startswith(f"{layers}.")}
    mode, calls = model.training, first

    def note(name: str) -> Any:
        return lambda module, args, kwargs, output: calls.note(name, args, kwargs, output)

    def enter(name: str) -> Any:
        """Returns a pre-hook that restores a layer's input from the first forward, except at the changed token."""

        def cleaned(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            if calls is first:
                inputs[name] = hidden
            # Hidden states with several residual streams may lead with the stream dim.
            if calls is first or hidden.shape[:2] != (rows, tokens):
                return None
            cleared = inputs[name].clone()
            cleared[:, place] = hidden[:, place]
            return ((cleared, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": cleared})

        return cleaned

    handles = [module.register_forward_hook(note(name), with_kwargs=True) for name, module in modules.items()]
    direct = (name for name in modules if "." not in name.removeprefix(f"{layers}."))
    handles += [modules[name].register_forward_pre_hook(enter(name), with_kwargs=True, prepend=True) for name in direct]
    others = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    try:
        model.eval()
        with torch.no_grad(), attention_replaced(_own_value):
            model(input_ids=ids, **others)
            calls = second
            model(input_ids=changed, **others)
    finally:
        model.train(mode)
        for handle in handles:
            handle.remove()

    def differs(one: dict[str, Tensor], other: dict[str, Tensor], name: str) -> bool:
        if name not in one or name not in other:
            return False
        other_tokens = torch.arange(tokens) != place
        difference = (one[name] - other[name])[:, other_tokens].abs().amax()
        return bool(difference > _TOLERANCE * one[name].abs().amax())

    mixing_names = {
        name
        for name in modules
        if differs(first.returned, second.returned, name) and not differs(first.given, second.given, name)
    }
    return frozenset(name for name in mixing_names if not any(other.startswith(f"{name}.") for other in mixing_names))


def unknown_mixing(model: nn.Module, spec: ModelSpec, batch: Mapping[str, Any]) -> str | None:
    """Returns which modules mix tokens that context parallelism would run on sequence shards, or `None`."""
    layers = find_layers(model, spec, "cp_size")
    known = find_full_sequence_blocks(model, spec, layers)
    mixing_names = find_token_mixing(model, batch, layers)
    unknown = sorted(name for name in mixing_names if not any(f"{name}.".startswith(f"{block}.") for block in known))
    if not unknown:
        return None
    kinds = {type(model.get_submodule(name)).__name__ for name in unknown}
    return f"tokens are mixed in {unknown[0]} ({', '.join(sorted(kinds))}), which is not a full-sequence block"


def full_share(model: nn.Module, state: ParallelState) -> float:
    """Returns the share of the layers' parameters whose compute context parallelism does not distribute.

    Args:
        model (`nn.Module`): the full-size model, possibly on the meta device.
        state (`ParallelState`): plan of this model, or of one with fewer layers.
    """
    layers = find_layers(model, state.spec, "cp_size")
    blocks = find_full_sequence_blocks(model, state.spec, layers)
    known = [name for name in blocks if heads_to_share(model.get_submodule(name), name, state) is None]
    sizes = {name: parameter.numel() for name, parameter in model.get_submodule(layers).named_parameters(prefix=layers)}
    replicated_numel = sum(size for name, size in sizes.items() if any(name.startswith(f"{block}.") for block in known))
    return replicated_numel / max(1, sum(sizes.values()))
