"""Parity tests of expert parallelism: combinations with other axes, ranks without tokens, seeded faults."""

import copy
import dataclasses
import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.compat.torch_autograd import in_backward
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.core.placement import GradientRule
from hf_megatron.errors import RankError
from hf_megatron.expert_parallel import all_to_all, experts, token_dispatcher
from hf_megatron.expert_parallel import axis as expert_axis
from hf_megatron.integrations.transformers import shard_operation
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = [
    "dp2+ep2+zero0",
    "dp2+ep2",
    "dp2+ep2+zero2",
    "dp2+ep2+zero3",
    "tp2+ep2",
    "tp2+sp+ep2",
    "cp2+ep2",
    "dp4+ep2",
    "dp4+ep2+zero3",
    "dp4+ep4",
    "tp4+ep2",
    "tp4+ep4",
    "dp2+tp2+ep4",
    "dp2+tp2+ep2",
    "dp2+tp2+sp+ep4",
    "dp2+tp2+ep2+zero3",
    "dp2+tp2+etp2+ep2",
    "dp2+tp2+sp+etp2+ep2",
    "dp2+tp2+etp2+ep2+zero3",
    "pp2+dp2+ep2",
    "pp2+dp2+ep2+zero3",
    "tp2+pp2+ep2",
    "tp2+sp+pp2+ep2",
    "cp2+tp2+sp+ep4",
    "cp2+dp2+ep2",
    "cp2+dp2+ep4+zero3",
    "pp2+cp2+ep2+mb2",
    "dp2+replicas2+ep2",
    "dp4+replicas2+ep2",
    "dp2+pp2+tp2+sp+ep4",
]
# Group-limited routers, gated shared experts, transposed experts with biases, experts called with all tokens.
TYPES = {"deepseek_v3": "tp2+sp+ep2", "qwen2_moe": "tp2+sp+ep2", "gpt_oss": "dp2+ep2", "llama4_text": "tp2+ep2"}


# Experts over tp, dp, both, and replicated: group-limited routers, selection biases, gates, no gates, transposed
# experts, stacked expert weights, models with state space layers.
FOUR_RANKS = {
    "deepseek_v3": ("dp4+ep4", "dp2+tp2+sp+ep4"),
    "ernie4_5_moe": ("tp4+ep4",),
    "gpt_oss": ("dp2+tp2+ep4",),
    "llama4_text": ("dp2+tp2+ep4",),
    "nemotron_h": ("dp4+ep4",),
    "minimax_m2": ("cp2+dp2+ep4",),
    "granitemoe": ("pp2+dp4+ep4+mb1",),
    "dbrx": ("dp4+ep4", "dp2+tp2+ep4"),
    "mixtral": ("dp4+ep4+zero3",),
}


@pytest.fixture(scope="module")
def tiny_model():
    return make_tiny_model(CONFIG_MAPPING["qwen3_moe"](), microbatches=2, batch_size=5)


def require_expert_shards(model):
    state = parallel_state(model)
    for name, parameter in model.named_parameters():
        if ".experts." in name and state.axes.size("pp") == 1:
            local = state.placement(name).local_shape(parameter.shape, state.axes)
            assert local[0] * state.axes.size("ep") == parameter.shape[0]
            assert local[1] < parameter.shape[1] or state.axes.size("etp") == 1 or "down" in name
            assert state.shardings[name].gradient.average == "edp"


@pytest.mark.parametrize("text", LAYOUTS)
def test_parity(tiny_model, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout, prepare=require_expert_shards)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize(("model", "text"), TYPES.items(), ids=list(TYPES))
def test_parity_for_other_expert_types(model, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(make_tiny_model(CONFIG_MAPPING[model](), microbatches=2), layout)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize(("model", "text"), [(model, text) for model, found in FOUR_RANKS.items() for text in found])
def test_parity_for_expert_types_on_four_ranks(model, text):
    [layout] = parse_layouts(text)
    tiny_model = make_tiny_model(CONFIG_MAPPING[model](), microbatches=2, batch_size=5)
    comparison = check_tiny_model(tiny_model, layout, prepare=require_expert_shards)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize(
    "text", ["dp2+ep2", "tp2+ep2", "tp2+sp+ep2", "cp2+ep2", "dp2+tp2+sp+ep4", "tp2+sp+pp2+ep2+mb1"]
)
def test_router_losses(text):
    changes = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    tiny_model = make_tiny_model(CONFIG_MAPPING["qwen3_moe"](), batch_size=4, changes=changes)
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout)
    assert comparison.passed, comparison.worst


@pytest.fixture(scope="module")
def with_identity_experts():
    tiny_model = make_tiny_model(CONFIG_MAPPING["longcat_flash"](), microbatches=2, batch_size=5)
    model, real, chosen = tiny_model.load(), tiny_model.config.n_routed_experts, []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args: chosen.append(args[1].flatten()))
    model(**tiny_model.batches[0])
    identity_fraction = (torch.cat(chosen) >= real).float().mean()
    assert (
        0.1 < identity_fraction < 0.9
        and len(set(torch.cat(chosen).tolist())) == real + tiny_model.config.zero_expert_num
    )
    return tiny_model


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize(
    "text",
    [
        *("dp2+ep2", "tp2+ep2", "tp2+sp+ep2", "cp2+ep2", "pp2+dp2+ep2"),
        *("dp4+ep2+zero3", "dp2+tp2+etp2+ep2", "dp2+tp2+etp2+ep2+zero3"),
    ],
)
def test_identity_experts(with_identity_experts, text, recompute):
    layout = dataclasses.replace(parse_layouts(text)[0], recompute=recompute)
    comparison = check_tiny_model(with_identity_experts, layout, prepare=require_expert_shards)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize(
    "changes",
    [
        {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3},
        {"n_routed_experts": 4, "zero_expert_num": 8},
        {"n_routed_experts": 6, "zero_expert_num": 0},
    ],
    ids=["several of a block", "more of them than of others", "none"],
)
def test_identity_expert_counts(changes):
    tiny_model = make_tiny_model(CONFIG_MAPPING["longcat_flash"](), batch_size=4, changes=changes)
    [layout] = parse_layouts("dp2+ep2")
    comparison = check_tiny_model(tiny_model, layout, prepare=require_expert_shards)
    assert comparison.passed, comparison.worst


def route_to_first_rank(model):
    """Biases all routers so that every token selects experts of the first rank."""
    for name, module in model.named_modules():
        if name.endswith("mlp.router"):
            with torch.no_grad():
                module.bias.copy_(torch.tensor([40.0, 40.0, *[-40.0] * (len(module.bias) - 2)]))


@pytest.mark.parametrize("text", ["dp2+ep2", "dp2+ep2+zero3", "tp2+ep2", "dp4+ep4"])
def test_ranks_without_tokens(text):
    # With other seeds an activation lies on its clamp bound, and a step of AdamW decides on which side.
    tiny_model = make_tiny_model(CONFIG_MAPPING["gpt_oss"](), microbatches=2, batch_size=4, seed=20)
    model = tiny_model.load()
    route_to_first_rank(model)
    reference = measure(model, tiny_model.batches)
    unused = [g[2:] for name, g in reference.gradients.items() if "experts." in name]
    assert unused and not any(gradient.any() for gradient in unused)
    starved = dataclasses.replace(tiny_model, reference=reference)
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(starved, layout, prepare=route_to_first_rank)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+ep2", "tp2+sp+ep2"])
@pytest.mark.parametrize("length", [1, 3])
def test_few_tokens(text, length):
    """With length 1, one sequence-parallel rank has no token and each dp rank has one."""
    config = CONFIG_MAPPING["qwen3_moe"]()
    tiny_model = make_tiny_model(config, batch_size=2, sequence_length=length + 1)
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout)
    assert comparison.passed, comparison.worst


@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+sp+ep2", "dp2+ep2+zero3", "pp2+dp2+ep2", "cp2+ep2"])
def test_recompute(tiny_model, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, dataclasses.replace(layout, recompute="full"))
    assert comparison.passed, comparison.worst


@pytest.fixture(scope="module")
def with_shared_experts():
    return make_tiny_model(CONFIG_MAPPING["deepseek_v3"](), microbatches=2)


@pytest.mark.parametrize("text", ["dp2+ep2", "dp2+ep2+zero3", "tp2+ep2", "cp2+ep2", "pp2+dp2+ep2"])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_shared_experts(with_shared_experts, text, recompute):
    layout = dataclasses.replace(parse_layouts(text)[0], recompute=recompute)
    comparison = check_tiny_model(with_shared_experts, layout)
    assert comparison.passed, comparison.worst


def record_overlap_events(tiny_model, recompute):
    """Returns the order of all-to-alls and shared experts in the second forward of a model and in its backward."""
    layout = ConfigUnderTest(dp_size=2, ep_size=2, recompute=recompute)
    model = tiny_model.load(megatron_config=layout).train()
    batch = {name: value[:1] for name, value in tiny_model.batches[0].items()}
    model(**batch).loss.backward()
    # Exchanges are kept alive so that ids are unique.
    events, exchanges = [], []
    post, wait = all_to_all._Exchange.post, all_to_all._Exchange.wait

    def wrap_call(name, function):
        def wrapper(self, *args):
            events.append((name, id(self)))
            exchanges.append(self)
            return function(self, *args)

        return wrapper

    class RecordOrder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            events.append(("shared", 0))
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            events.append(("shared backward", 0))
            return gradient

    def record_shared_experts(module, args, output):
        return RecordOrder.apply(output)

    all_to_all._Exchange.post, all_to_all._Exchange.wait = wrap_call("post", post), wrap_call("wait", wait)
    for module in model.modules():
        if hasattr(module, "early"):
            module.down_proj.register_forward_hook(shard_safe(record_shared_experts))
    loss = model(**batch).loss
    forward, events[:] = list(events), []
    loss.backward()
    return forward, events


@pytest.mark.parametrize("recompute", [None, "full"])
def test_shared_experts_overlap_token_exchange(with_shared_experts, recompute):
    """In every layer shared experts run while an all-to-all is in flight, in forward and in backward."""

    def count_pending_exchanges(events, name):
        pending = []
        for place, (kind, _) in enumerate(events):
            if kind == name:
                posted = {key for event, key in events[:place] if event == "post"}
                waited = {key for event, key in events[:place] if event == "wait"}
                pending.append(len(posted - waited))
        return pending

    for forward, backward in run_ranks(record_overlap_events, 2, with_shared_experts, recompute):
        assert count_pending_exchanges(forward, "shared") and all(count_pending_exchanges(forward, "shared"))
        if recompute is None:
            assert count_pending_exchanges(backward, "shared backward") and all(
                count_pending_exchanges(backward, "shared backward")
            )
        else:
            assert all(count_pending_exchanges(backward, "shared"))


def measure_copy_losses(tiny_model, layout):
    """Returns a copy's loss: unchanged, after a change of the original, and after a change of the copy."""
    model = tiny_model.load(megatron_config=layout).eval()
    batch = tiny_model.batches[0]
    with torch.no_grad():
        for _ in range(2):
            model(**batch)
        copied_model = copy.deepcopy(model)
        losses = [copied_model(**batch).loss.item()]
        for changed, factor in ((model, 0.0), (copied_model, 3.0)):
            for name, parameter in changed.named_parameters():
                if "shared_experts" in name:
                    parameter.mul_(factor)
            losses.append(copied_model(**batch).loss.item())
    return losses


@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+ep2"])
def test_deepcopy_has_independent_shared_experts(with_shared_experts, text):
    expected = measure_copy_losses(with_shared_experts, None)
    assert expected[0] == expected[1] != expected[2]
    layout = ConfigUnderTest(**parse_layouts(text)[0].to_dict())
    for losses in run_ranks(measure_copy_losses, 2, with_shared_experts, layout):
        assert losses == pytest.approx(expected, rel=1e-5)


def count_routes():
    """Counts computed routes; returns a list of their number in forward and in backward."""
    counts = [0, 0]
    original = token_dispatcher.AllToAll._route

    def route(self, chosen):
        counts[in_backward()] += 1
        return original(self, chosen)

    token_dispatcher.AllToAll._route = route
    return counts


def count_routes_in_step(tiny_model, reentrant):
    counts = count_routes()
    model = tiny_model.load(megatron_config=ConfigUnderTest(dp_size=2, ep_size=2)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    rank = parallel_state(model).mesh.dp_rank
    losses = [model(**{k: v[rank : rank + 1] for k, v in batch.items()}).loss for batch in tiny_model.batches]
    sum(losses).backward()
    return counts, sum(isinstance(module, experts.ParallelExperts) for module in model.modules())


def test_recomputed_layers_route_once(tiny_model):
    """With two active forwards; reentrant checkpoints rerun layers on detached inputs, which are routed again."""
    for counts, moe_blocks in run_ranks(count_routes_in_step, 2, tiny_model, False):
        assert counts == [2 * moe_blocks, 0]
    for counts, moe_blocks in run_ranks(count_routes_in_step, 2, tiny_model, True):
        assert counts == [2 * moe_blocks, 2 * moe_blocks]


def test_recompute_reuses_routing(tiny_model):
    """A router that selects other experts when recomputed, as near-ties do on accelerators, has no effect."""

    def perturb_recomputed_routers(model):
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                stock = module.forward

                def forward(hidden, stock=stock, module=module):
                    if not in_backward():
                        return stock(hidden)
                    with torch.no_grad():
                        module.weight.neg_()
                    try:
                        return stock(hidden)
                    finally:
                        with torch.no_grad():
                            module.weight.neg_()

                module.forward = shard_safe(forward)

    # Scores of the negated router have another gradient, so dispatched experts are compared instead of gradients.
    def collect_dispatches(model_edit):
        model = tiny_model.load(megatron_config=ConfigUnderTest(dp_size=2, ep_size=2, recompute="full")).train()
        model_edit(model)
        sent = []
        original = token_dispatcher.AllToAll.dispatch

        def record_dispatch(self, hidden, chosen, *args):
            result = original(self, hidden, chosen, *args)
            sent.append((in_backward(), chosen.tolist()))
            return result

        token_dispatcher.AllToAll.dispatch = record_dispatch
        batch = tiny_model.batches[0]
        model(**{k: v[:1] for k, v in batch.items()}).loss.backward()
        return sent

    for sent in run_ranks(collect_dispatches, 2, perturb_recomputed_routers):
        forward = [chosen for again, chosen in sent if not again]
        backward = [chosen for again, chosen in sent if again]
        assert len(forward) == len(backward) > 0
        assert forward == backward[::-1]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_expert_implementations(tiny_model, implementation):
    [layout] = parse_layouts("dp2+ep2")

    def choose(model):
        model.set_experts_implementation(implementation)

    comparison = check_tiny_model(tiny_model, layout, prepare=choose)
    assert comparison.passed, comparison.worst


class _WeightPenalty(torch.autograd.Function):
    """Identity on a loss; its backward adds a weight decay gradient directly to the weights."""

    @staticmethod
    def forward(ctx, loss, *weights):
        ctx.save_for_backward(*weights)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(0.5 * gradient * weight for weight in ctx.saved_tensors)


def register_weight_penalty(model):
    model.register_forward_hook(_add_penalty)


def _add_penalty(model, args, output):
    if torch.is_grad_enabled():
        output.loss = _WeightPenalty.apply(output.loss, *model.parameters())


@pytest.mark.parametrize("text", ["dp2+ep2", "dp4+ep2+zero2", "cp2+ep2", "tp4+ep2", "dp2+tp2+ep4", "dp2+tp2+etp2+ep2"])
def test_weight_penalties_count_once(tiny_model, text):
    """Gradients of weight penalties count once, whichever ranks dispatch tokens to the experts."""
    model = tiny_model.load()
    register_weight_penalty(model)
    reference = measure(model, tiny_model.batches)
    reference.cancelled = tiny_model.reference.cancelled
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(
        dataclasses.replace(tiny_model, reference=reference), layout, prepare=register_weight_penalty
    )
    assert comparison.passed, comparison.worst


# Seeded faults


def average_over(axis):
    def set_gradient_average():
        original = expert_axis.place

        def place(model, state):
            original(model, state)
            for name, sharding in state.shardings.items():
                if sharding.gradient.average == "edp":
                    state.shardings[name] = dataclasses.replace(sharding, gradient=GradientRule(average=axis))

        expert_axis.place = place

    return set_gradient_average


def divide_by_all_ranks():
    from hf_megatron.data_parallel.grad_sync_groups import GradSyncGroup

    original = GradSyncGroup.along.__func__

    def along(cls, axis, mesh):
        group = original(cls, axis, mesh)
        return dataclasses.replace(group, divisor=mesh.axes.size("dp_cp")) if axis == "edp" else group

    GradSyncGroup.along = classmethod(along)


def dispatch_from_every_tp_rank():
    original = expert_axis.install

    def install(model, state):
        original(model, state)
        for module in model.modules():
            if isinstance(module, experts.ParallelExperts):
                module.ranks.shared_with = None

    expert_axis.install = install


def route_to_wrong_expert():
    original = token_dispatcher.AllToAll.dispatch

    def dispatch_to_next_expert(self, *args):
        dispatched, route = original(self, *args)
        local = dispatched.experts
        swapped = torch.where(local < self.experts, (local + 1) % self.experts, local)
        return dispatched._replace(experts=swapped), route

    token_dispatcher.AllToAll.dispatch = dispatch_to_next_expert


def halve_all_to_all_gradient():
    original = all_to_all._Arrive.backward

    def backward(ctx, gradient):
        return original(ctx, gradient * 0.5)

    all_to_all._Arrive.backward = staticmethod(backward)


def detach_router_weights():
    original = token_dispatcher.AllToAll.dispatch

    def dispatch_detached(self, hidden, chosen, weights, *args):
        return original(self, hidden, chosen, weights.detach(), *args)

    token_dispatcher.AllToAll.dispatch = dispatch_detached


FAULTS = {
    "averaged over dp": (average_over("dp"), "dp2+ep2"),
    "averaged over dp, repeated": (average_over("dp"), "dp4+ep2"),
    "divided by all": (divide_by_all_ranks, "dp4+ep2"),
    "every tp rank sends all tokens": (dispatch_from_every_tp_rank, "tp2+ep2"),
    "wrong expert": (route_to_wrong_expert, "dp2+ep2"),
    "half the gradient": (halve_all_to_all_gradient, "dp2+ep2"),
    "router detached": (detach_router_weights, "tp2+ep2"),
}


@pytest.mark.parametrize(("sabotage", "text"), FAULTS.values(), ids=list(FAULTS))
def test_seeded_faults_are_detected(tiny_model, sabotage, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout, sabotage=sabotage)
    assert not comparison.passed and comparison.worst.value > 10


def set_identity_share(share):
    original = expert_axis.install

    def install(model, state):
        original(model, state)
        for module in model.modules():
            if isinstance(module, experts.ParallelExperts):
                module.ranks.identity_share = share

    expert_axis.install = install


def assume_contiguous_expert_ids():
    token_dispatcher.ExpertBlocks.by_rank = lambda self, chosen: chosen


def assume_contiguous_expert_files():
    shard_operation.place_in_run = lambda sharding, source, index: index


IDENTITY_EXPERT_FAULTS = {
    "not handed back": (functools.partial(set_identity_share, 0.0), "dp2+ep2"),
    "handed back by every tp rank": (functools.partial(set_identity_share, 1.0), "dp2+tp2+etp2+ep2"),
    "choices of a run": (assume_contiguous_expert_ids, "dp2+ep2"),
    "files of a run": (assume_contiguous_expert_files, "dp2+ep2"),
}


@pytest.mark.parametrize(("sabotage", "text"), IDENTITY_EXPERT_FAULTS.values(), ids=list(IDENTITY_EXPERT_FAULTS))
def test_identity_expert_faults_are_detected(with_identity_experts, sabotage, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(with_identity_experts, layout, sabotage=sabotage)
    assert not comparison.passed and comparison.worst.value > 10


def test_starved_experts_outside_the_graph_are_detected():
    """Seeded fault: experts of a rank without tokens are outside the autograd graph."""

    def detach_empty_experts():
        original = experts.ParallelExperts._computed

        def compute(self, dispatched, route):
            if not route.pairs:
                return dispatched.rows.detach()
            return original(self, dispatched, route)

        experts.ParallelExperts._computed = compute

    # With other seeds an activation lies on its clamp bound, and a step of AdamW decides on which side.
    tiny_model = make_tiny_model(CONFIG_MAPPING["gpt_oss"](), microbatches=2, batch_size=4, seed=20)
    model = tiny_model.load()
    route_to_first_rank(model)
    starved = dataclasses.replace(tiny_model, reference=measure(model, tiny_model.batches))
    [layout] = parse_layouts("tp2+ep2")
    with pytest.raises(RankError, match="stuck|failed|died"):
        check_tiny_model(starved, layout, sabotage=detach_empty_experts, prepare=route_to_first_rank, timeout=20)
