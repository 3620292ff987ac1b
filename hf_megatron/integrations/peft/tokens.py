"""Trained tokens: entries of the embedding and the head that PEFT replaces by trained ones, `[tokens, hidden]`.

Every rank has all trained entries. The embedding runs as it is sharded, and the trained entries replace its output;
a head multiplies by its local weight with its trained entries replaced, so that a vocab-parallel loss reads them. Each
rank then has the gradient of the entries in its vocabulary shard only, hence their sum over tp. Tied to each other,
both modules read one parameter, which both ends of a pipeline hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compat.ecosystem import name_without_tuners
from ...compat.torch_dtensor import dtensor_from_local, local_tensor
from ...core.communication.full_tensor import held_ranges
from ...core.off_stage import is_off_stage
from ...parallel_state import ParallelState
from ...tensor_parallel.linear import ParallelLinear
from ...tensor_parallel.local_parameters import local_view, swap_class, weight_in_use
from ...tensor_parallel.styles import AXIS
from .site import Site

_DELTA = "trainable_tokens_delta"


def tokens_layer(tuner: Any) -> Any:
    """Returns the layer with the trained tokens inside a wrapper of LoRA's, or the module itself."""
    return tuner._modules.get("token_adapter", tuner)


def has_own_tokens(tuner: Any) -> bool:
    """Returns whether a tuner layer has parameters of its own, which trained tokens tied to others have not."""
    return getattr(tokens_layer(tuner), "tied_adapter", None) is None


@contextmanager
def all_ties(model: Any, state: ParallelState) -> Iterator[None]:
    """Lists the ties to weights of other pipeline stages inside, so that PEFT wraps the same modules on all stages."""
    if state.cut is None:
        yield
        return
    before = model._tied_weights_keys
    # By their names outside of tuner layers, as PEFT expects them.
    sources = {name_without_tuners(name): name_without_tuners(source) for name, source in state.cut.sources.items()}
    model._tied_weights_keys = {**sources, **(before or {})}
    try:
        yield
    finally:
        model._tied_weights_keys = before


def shard_tokens(tuner: Any, site: Site) -> None:
    """Replicates new trained tokens, and makes the wrapped module read them."""
    layer, state, weight = tokens_layer(tuner), site.state, f"{site.base_name}.weight"
    prefix = "" if layer is tuner else "token_adapter."
    for adapter in list(layer.trainable_tokens_delta.keys()) if has_own_tokens(layer) else ():
        inner = f"{prefix}{_DELTA}.{adapter}"
        if site.has_sharding(inner):
            continue
        site.replicate_value(layer.trainable_tokens_delta, adapter, inner)
        if state.cut is not None and state.is_tied(weight):
            state.cut.retie((*state.cut.tied, f"{site.name}.{inner}"), state.cut.sources)
    if isinstance(layer, ShardedTokens):
        return
    layer.__class__ = _sharded(type(layer))  # type: ignore[arg-type]
    layer.is_off_stage, layer.group = site.is_off_stage, None
    if site.is_off_stage or isinstance(site.base, nn.Embedding):
        return
    if any(split.axis == AXIS for split in state.shardings[weight].placement.on(state.axes).splits):
        layer.group = state.mesh.tp_group
    if not isinstance(site.base, ParallelLinear):
        swap_class(site.base, UpdatedLinear)
    site.base.weight_update = layer.updated  # type: ignore[assignment]


class UpdatedLinear(nn.Linear):
    """Linear that multiplies by its weight `[out, in]` with the update of an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, weight_in_use(self), local_view(self.bias))


class ShardedTokens(nn.Module):
    """Replaces the computations of PEFT's `TrainableTokensLayer` on a parallelized model.

    Attributes:
        is_off_stage: whether the wrapped module belongs to another pipeline stage.
        group (*optional*): ranks over which a head's vocabulary is split.
    """

    base_layer: Any
    is_off_stage: bool
    group: dist.ProcessGroup | None
    trainable_tokens_delta: nn.ParameterDict
    trainable_tokens_original: Any
    token_indices: dict[str, list[int]]
    merged_adapters: list[str]

    def forward_adapters(self, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module: ids `[batch, sequence]`, or a head's input `[batch, sequence, hidden]`."""
        base: Any = self.base_layer
        if self.disable_adapters and self.merged:
            self.unmerge()
        output = base(x, *args, **kwargs)
        boundary = getattr(base, "_stage_boundary", None)
        if not isinstance(base, nn.Embedding) or (boundary is not None and boundary.stage != 0):
            # A head reads the trained tokens with its weight.
            return output
        for adapter in self._updating(active_adapters):
            output = self._embed(x, output, adapter)
        return output

    def _updating(self, adapters: Any) -> list[str]:
        """Returns the adapters whose tokens are added to the wrapped module in a forward."""
        if self.is_off_stage or self.disable_adapters or self.merged:
            return []
        names = [adapter for adapter in adapters if adapter in self.trainable_tokens_delta]
        self._check_overlapping_tokens(names)  # type: ignore[operator]
        return names

    def _embed(self, ids: Tensor, output: Tensor, adapter: str) -> Tensor:
        """Replaces the embeddings `[batch, sequence, hidden]` of trained tokens; their gradient is complete."""
        tokens, order = torch.tensor(self.token_indices[adapter], device=ids.device).sort(stable=True)
        # [batch, sequence]: place of each id among the sorted tokens. The last one of equal tokens counts.
        place = (torch.searchsorted(tokens, ids, right=True) - 1).clamp(min=0)
        is_trained = (tokens[place] == ids).unsqueeze(-1)
        delta: Any = local_view(self.trainable_tokens_delta._parameters[adapter])
        embedded = F.embedding(order[place], delta.to(output.dtype))
        if (padding := self.base_layer.padding_idx) is not None:
            # The padding entry gets no gradient, as in nn.Embedding.
            embedded = embedded.detach().where((ids == padding).unsqueeze(-1), embedded)
        scale = self._get_embed_scale()  # type: ignore[operator]
        if scale is not None:
            embedded = embedded * scale.to(output.dtype)
        return embedded.where(is_trained, output)

    def updated(self, weight: Tensor, local: Tensor) -> Tensor:
        """Returns the local weight `[local vocab, local hidden]` with the trained entries of the active adapters.

        Args:
            weight: the weight at rest.
            local: its local tensor.
        """
        for adapter in self._updating(self.active_adapters):
            delta: Any = local_view(self.trainable_tokens_delta._parameters[adapter], self.group)
            local = local.index_copy(0, *self._local_entries(weight, delta.to(local.dtype), adapter))
        return local

    def get_merged_weights(self, active_adapters: list[str]) -> Tensor:
        """Returns the weight `[vocab, hidden]` with the trained entries, sharded as the weight is."""
        weight = self.base_layer.weight
        if is_off_stage(weight):
            return weight
        merged = self.updated(weight, local_tensor(weight))
        return dtensor_from_local(merged, weight) if isinstance(weight, DTensor) else merged

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Writes trained entries to the weight."""
        from peft.tuners.tuners_utils import check_adapters_to_merge

        names = check_adapters_to_merge(self, adapter_names)  # type: ignore[arg-type]
        self._check_overlapping_tokens(names)  # type: ignore[operator]
        for adapter in names:
            delta: Any = self.trainable_tokens_delta._parameters[adapter]
            if not is_off_stage(delta):
                if safe_merge and not torch.isfinite(local_tensor(delta)).all():
                    raise ValueError(f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken")
                self._write(local_tensor(delta), adapter)
            self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Writes the original entries to the weight."""
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            self._write(self.trainable_tokens_original[adapter], adapter)

    @torch.no_grad()
    def _write(self, entries: Tensor, adapter: str) -> None:
        weight = self.base_layer.weight
        if not self.is_off_stage:
            local = local_tensor(weight)
            local.index_copy_(0, *self._local_entries(weight, entries.to(local), adapter))

    def _local_entries(self, weight: Tensor, entries: Tensor, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns the places in the local weight of an adapter's tokens `[local tokens]`, and their entries.

        A rank without any of them keeps the entries in its graph: it takes part in the sum of gradients.
        """
        vocabulary, columns = held_ranges(weight)
        places, chosen, passed = [], [], 0
        for start, stop in vocabulary:
            for index, token in enumerate(self.token_indices[adapter]):
                if start <= token < stop:
                    places.append(passed + token - start)
                    chosen.append(index)
            passed += stop - start
        entries = torch.cat([entries[:, start:stop] for start, stop in columns], 1)
        here, kept = (torch.tensor(values, dtype=torch.int64, device=entries.device) for values in (places, chosen))
        return here, entries.index_select(0, kept)


@cache
def _sharded(base: Any) -> Any:
    return type(base.__name__, (ShardedTokens, base), {})
