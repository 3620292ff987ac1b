"""MLPs computed in tiles of tokens, in forward and in recomputation (Bekman et al., 2025, "ALST", TiledMLP).

Only one tile's wide activations exist at a time, whatever the sequence length. MLPs are detected by structure: they
contain only linears, activations and dropout. The first call of each class checks on some tokens that the MLP is
pointwise over tokens.
"""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...compat.instance_patches import mix_into
from ...compat.transformers_models import fetches_attention_core
from ...errors import UnsupportedError

# Dim of the tokens in `[..., tokens, hidden]`.
_TOKENS = -2
# Number of tokens of the first call that are computed both at once and in two halves.
_COMPARED = 64


def tile_mlps(model: nn.Module, layers: str, tokens: int) -> list[str]:
    """Tiles the MLPs of a model's layers in training; returns their names.

    Args:
        layers (`str`): name of the layer list.
        tokens (`int`): tokens per tile, over all sequences of a batch.
    """
    compared: set[type] = set()
    mlp_names = list(find_mlps(model, layers))
    for name in mlp_names:
        mix_into(model.get_submodule(name), TiledMLP, _tile=tokens, _mlp_name=name, _compared=compared)
    return mlp_names


def find_mlps(model: nn.Module, layers: str) -> Iterator[str]:
    """Yields the names of the outermost MLPs of each layer."""
    last = None
    for name, module in model.get_submodule(layers).named_modules(prefix=layers):
        if (last is None or not name.startswith(f"{last}.")) and name != layers and _is_mlp(module):
            last = name
            yield name


def _is_mlp(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    required = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if len(required) != 1 or fetches_attention_core(type(module)) or isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    if any(True for _ in module.parameters(recurse=False)):
        return False
    inner = [part for part in module.modules() if part is not module]
    leaves = [part for part in inner if next(part.children(), None) is None]
    with_weights = [part for part in leaves if next(part.parameters(), None) is not None]
    return len(with_weights) >= 2 and len(leaves) == len(inner) and all(map(_is_linear, with_weights))


def _is_linear(part: nn.Module) -> bool:
    weight = getattr(part, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(part, nn.Embedding)


class TiledMLP(nn.Module):
    """Mixin for an MLP that computes it in tiles of tokens.

    Attributes:
        _tile (`int`): number of tokens per tile.
        _mlp_name (`str`): name of the MLP.
        _compared: classes verified to be pointwise over tokens.
    """

    _tile: int
    _mlp_name: str
    _compared: set[type]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Computes `[..., tokens, hidden]` in tiles; runs the plain forward outside training or for one tile."""
        rows = math.prod(hidden.shape[:_TOKENS])
        # Tokens of each sequence per tile.
        size = max(1, self._tile // max(1, rows))
        is_trained = self.training and torch.is_grad_enabled()
        if args or kwargs or not is_trained or hidden.dim() < 2 or hidden.shape[_TOKENS] <= size:
            return super().forward(hidden, *args, **kwargs)
        self._compare(hidden)
        # checkpoint saves only the tile's input [..., size, hidden] and recomputes its wide activations in backward.
        parts = [
            # Some linears call `view` on their input, so a tile has to be contiguous.
            checkpoint(super(TiledMLP, self).forward, part.contiguous(), use_reentrant=False)
            for part in hidden.split(size, dim=_TOKENS)
        ]
        return torch.cat(parts, dim=_TOKENS)  # type: ignore[arg-type]

    @torch.no_grad()
    def _compare(self, hidden: Tensor) -> None:
        kind = type(self).__mro__[2]
        if kind in self._compared:
            return
        modes = [(part, part.training) for part in self.modules()]
        try:
            # Dropout is disabled: it would differ between the two results.
            for part, _ in modes:
                part.training = False
            some = hidden.narrow(_TOKENS, 0, min(_COMPARED, hidden.shape[_TOKENS]))
            halves = some.tensor_split(2, dim=_TOKENS)
            apart = torch.cat([super(TiledMLP, self).forward(half.contiguous()) for half in halves], _TOKENS)
            together = super().forward(some.contiguous())
        finally:
            for part, mode in modes:
                part.training = mode
        # Matmuls of other shapes round differently; mixing tokens causes far larger differences.
        limit = 0.05 * together.abs().amax()
        if not bool(((apart - together).abs() <= limit).all()):
            raise UnsupportedError(
                f"MegatronConfig.mlp_chunk_size = {self._tile} is not supported for {self._mlp_name} "
                f"({kind.__name__}): it does not process tokens independently. Use mlp_chunk_size=None."
            )
        self._compared.add(kind)
