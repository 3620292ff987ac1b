"""Toy axis that shards dim 0 of the MLP up projections over pairs of dp ranks; the forward gathers the full weight.

The ranks of a pair have different samples: the gradient of a local shard is summed over the pair, halved, and averaged
over the other pairs. All other gradients are reduced over all dp ranks as usual.
"""

from dataclasses import replace

from hf_megatron.core.communication.collectives import gather_from_ranks
from hf_megatron.core.communication.mean_grad_ops import scale_gradient
from hf_megatron.core.placement import GradientRule, Placement
from hf_megatron.tensor_parallel.local_parameters import local_view

NAME = "toy"
PAIR = 2
SPLIT = "up_proj.weight"


def place(model, state):
    dp = state.axes["dp"]
    others = dp.without(dp.inner(PAIR))
    state.axes = state.axes.with_axis(NAME, dp.inner(PAIR)).with_axis("others", others)
    replicas = others.common(state.axes["dp_replicate"])
    state.axes = state.axes.with_axis("others_replicate", replicas).with_axis("others_shard", others.without(replicas))
    for name, sharding in state.shardings.items():
        if name.endswith(SPLIT):
            rule = GradientRule(average="others")
            state.shardings[name] = replace(sharding, style=NAME, placement=Placement.split(NAME, 0), gradient=rule)


def install(model, state):
    group = state.mesh.group(NAME)
    for name, module in model.named_modules():
        sharding = state.shardings.get(f"{name}.weight")
        if sharding is not None and sharding.style == NAME and module._parameters.get("weight") is not None:
            module.__class__ = _make_gathering_class(type(module), sharding.shape[0], group)


def _make_gathering_class(base, rows, group):
    def weight(module):
        local = scale_gradient(local_view(module._parameters["weight"]), 1 / PAIR)
        return gather_from_ranks(local, 0, rows, group, sum_gradient=True)

    return type(base.__name__, (base,), {"weight": property(weight)})
