"""Attributes replaced on single objects of a parallelized model, with reasons and restoration.

Upstream classes stay unchanged: these patches belong to one parallelized model and are freed with it. `disable()`
restores the originals, `enable()` reapplies the patches; in between, a parallelized model cannot be called.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from .patch_registry import PATCH_REGISTRY
from .shared import Shared
from .torch_autograd import inherit_forward
from .transformers_models import get_recorder_attributes


@dataclass(frozen=True)
class InstancePatch:
    """Replacement of one attribute on an object.

    Attributes:
        stock: behavior of the original.
        until: condition under which the patch is no longer needed.
    """

    stock: str
    until: str


INSTANCE_PATCHES: Mapping[str, InstancePatch] = {
    "loss_function": InstancePatch(
        "averages over the targets of the local batch, from full logits",
        "transformers lets a model define the denominator and the kernel of its loss",
    ),
    "forward": InstancePatch(
        "runs every layer locally (pipelines); reads the full head's weight (TRL's per-token log-probabilities)",
        "transformers runs pipelines with a loss inside forward; TRL reads log-probabilities through the model",
    ),
    "_deepstack_process": InstancePatch(
        "reads full hidden states where layers have a shard of the sequence",
        "transformers shards the sequences of such models, or passes image features to layers",
    ),
    "cache_mem": InstancePatch(
        "keeps full hidden states where layers have a shard of the sequence (XLNet's memory)",
        "transformers keeps hidden states between layers in `capture_outputs` only",
    ),
    "num_parameters": InstancePatch(
        "counts the parameters of the local stages", "always: a rank holds the parameters of its stages"
    ),
    "zero_grad": InstancePatch(
        "clears `.grad`, but reduced gradients are in buckets", "always: this library has its own buckets"
    ),
    "tie_weights": InstancePatch(
        "ties by a config that the stages were not created from", "stages are on different ranks"
    ),
    "no_sync": InstancePatch(
        "missing, or FSDP2's, which Accelerate does not support", "always: this library has its own buckets"
    ),
    "__deepcopy__": InstancePatch("FSDP2's assertion (stage 3)", "FSDP2 copies its units"),
    "_get_name": InstancePatch(
        "the name of FSDP2's class (stage 3), by which Trainer does not recognize a causal language model",
        "Trainer reads from the model whether its loss shifts labels",
    ),
    "dequantize": InstancePatch(
        "replaces the modules of its quantizer by linears (models with `quantization_config=`)",
        "always: each rank holds a shard of each weight",
    ),
    "parallel_plan": InstancePatch("missing", "always: a method of parallelized models"),
    "parallel_hooks": InstancePatch("missing", "always: a method of parallelized models"),
    "_tp_size": InstancePatch(
        "the ranks of transformers' own plan; Trainer and Accelerate derive the data-parallel size from it",
        "Trainer lets a model define its data-parallel ranks",
    ),
    "_tp_plan": InstancePatch(
        "transformers' plan; generation would divide the KV heads by it again",
        "generation reads the head count from the cache",
    ),
    "_is_distributed_loading_by_transformers": InstancePatch(
        "false: Accelerate would move the model to one device", "Accelerate reads from the model whether it is placed"
    ),
    "distributed_config": InstancePatch("none, or transformers' own", "always: it describes the parallel layout"),
}
_ABSENT = object()


class ModelPatches(Shared):
    """Replaced attributes of one model, including its config."""

    def __init__(self) -> None:
        self._replaced: list[tuple[weakref.ref, str, Any, Any]] = []
        self._applied = True
        PATCH_REGISTRY.instances.add(self)

    def replace(self, owner: Any, attribute: str, value: Any) -> None:
        """Replaces an attribute that `INSTANCE_PATCHES` lists."""
        assert attribute in INSTANCE_PATCHES, attribute
        is_property = isinstance(getattr(type(owner), attribute, None), property)
        before = getattr(owner, attribute) if is_property else vars(owner).get(attribute, _ABSENT)
        self._replaced.append((weakref.ref(owner), attribute, before, value))
        setattr(owner, attribute, value)

    def apply(self) -> None:
        """Reapplies the replacements."""
        if not self._applied:
            for reference, attribute, _, value in self._replaced:
                if (owner := reference()) is not None:
                    setattr(owner, attribute, value)
        self._applied = True

    def restore(self) -> None:
        """Restores the original attributes, the last replacement first."""
        if self._applied:
            for reference, attribute, before, _ in reversed(self._replaced):
                owner = reference()
                if owner is not None and before is _ABSENT:
                    delattr(owner, attribute)
                elif owner is not None:
                    setattr(owner, attribute, before)
        self._applied = False


@cache
def _mixed_class(mixin: Any, base: Any) -> type[nn.Module]:
    subclass = type(base.__name__, (mixin, base), get_recorder_attributes(base))
    inherit_forward(subclass)
    return subclass


def mix_into(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Mixes a class into a module's class; attributes are set without registering them as parameters or modules."""
    module.__class__ = _mixed_class(mixin, type(module))  # type: ignore[arg-type]
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
