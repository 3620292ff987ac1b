"""Parity tests of router replay, on all layouts and for all router types."""

import contextlib
import dataclasses
import re

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from hf_megatron import ConfigError, UnsupportedError, record_routing, replay_routing
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.expert_parallel.router_replay import Routing, _Player
from hf_megatron.models import verified
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.cases import causal_types
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = [
    "tp2",
    "tp2+sp",
    "dp2",
    "pp2",
    "cp2",
    "dp2+ep2",
    "tp2+sp+ep2",
    "tp2+sp+cp2+ep2",
    "pp2+dp2+ep2+zero3",
    "tp2+sp+pp2+ep2",
    "pp2+cp2+ep2",
]


@pytest.fixture(scope="module")
def tiny_model():
    return make_tiny_model(CONFIG_MAPPING["deepseek_v3"](), microbatches=2)


def make_routing(input_ids, layers, experts, choices):
    """Returns artificial expert choices that differ between layers: `[layers, batch, tokens, choices]`."""
    first = input_ids + torch.arange(layers).view(-1, 1, 1)
    return (first.unsqueeze(-1) + torch.arange(choices)) % experts


def replay_by_token(model):
    """Replays the result of `make_routing` for the tokens of every following call."""
    with record_routing(model) as recording:
        pass
    config = model.config.get_text_config()
    experts, choices = config.n_routed_experts, config.num_experts_per_tok
    routing = Routing(recording.layers)
    model.under_replay = contextlib.ExitStack()
    model.under_replay.enter_context(replay_routing(model, routing))

    def append_routing(module, args, kwargs):
        routing.calls.append(make_routing(kwargs["input_ids"], len(recording.layers), experts, choices))

    model.register_forward_pre_hook(append_routing, with_kwargs=True, prepend=True)


@pytest.fixture(scope="module")
def replayed(tiny_model):
    """The tiny model with a reference that replays routing."""
    model = tiny_model.load()
    replay_by_token(model)
    reference = measure(model, tiny_model.batches)
    assert abs(reference.loss - tiny_model.reference.loss) > 1e-4
    return dataclasses.replace(tiny_model, reference=reference)


@pytest.mark.parametrize("text", LAYOUTS)
def test_replay(replayed, text):
    comparison = check_tiny_model(replayed, parse_layouts(text)[0], prepare=replay_by_token)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", ["tp2", "dp2+ep2", "tp2+sp+pp2+ep2", "cp2+ep2"])
def test_replay_with_recompute(replayed, text):
    layout = dataclasses.replace(parse_layouts(text)[0], recompute="full")
    comparison = check_tiny_model(replayed, layout, prepare=replay_by_token)
    assert comparison.passed, comparison.report()


def shift_routing_by_one_token():
    """Shifts the replayed routing by one token at every router."""
    original = _Player.choose

    def choose(self, name, call, live, is_group):
        call.routing = call.routing.roll(1, 1)
        return original(self, name, call, live, is_group)

    _Player.choose = choose


def test_misaligned_routing_is_detected(replayed):
    assert not check_tiny_model(
        replayed, parse_layouts("dp2+ep2")[0], prepare=replay_by_token, sabotage=shift_routing_by_one_token
    ).passed


def record_on_layout(tiny_model, layout):
    model = tiny_model.load(megatron_config=ConfigUnderTest(**layout.to_dict())).eval()
    batch = tiny_model.batches[0]["input_ids"]
    mesh = parallel_state(model).mesh
    samples = batch.tensor_split(mesh.dp_size)[mesh.dp_rank]
    with record_routing(model) as routing, torch.no_grad():
        model(input_ids=samples)
        model.base_model(input_ids=samples) if mesh.pp_size == 1 else model(input_ids=samples)
    return mesh.dp_rank, mesh.dp_size, routing.layers, routing.calls


@pytest.mark.parametrize("text", LAYOUTS)
def test_recorded_routing_matches_single_process(tiny_model, text):
    layout = parse_layouts(text)[0]
    model = tiny_model.load().eval()
    batch = tiny_model.batches[0]["input_ids"]
    with record_routing(model) as routing, torch.no_grad():
        model(input_ids=batch)
    assert routing.calls[0].min() >= 0 and len(routing.calls) == 1
    for rank, ranks, layers, calls in run_ranks(
        record_on_layout,
        layout.ranks_per_replica * layout.dp_size if layout.dp_size else layout.ranks_per_replica,
        tiny_model,
        layout,
    ):
        local_routing = routing.calls[0].tensor_split(ranks, 1)[rank]
        assert layers == routing.layers and len(calls) == 2
        assert torch.equal(calls[0], local_routing) and torch.equal(calls[1], local_routing)


def generate_and_replay(tiny_model, megatron_config=None):
    model = tiny_model.load(megatron_config=megatron_config).eval()
    prompt = tiny_model.batches[0]["input_ids"][:2, :5]
    with record_routing(model) as routing:
        tokens = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.neg_()
    generated_routing = routing.joined(tokens.shape[1])
    with replay_routing(model, generated_routing), record_routing(model) as replayed_routing:
        loss = model(input_ids=tokens, labels=tokens).loss
    assert torch.equal(replayed_routing.calls[0][:, :, : generated_routing.shape[2]], generated_routing)
    return tokens, generated_routing, loss.item()


def test_generated_routing_replays_in_training(tiny_model):
    """Routing recorded in `generate()`, for the prompt and each token, is replayed in a forward of full sequences."""
    tokens, routing, loss = generate_and_replay(tiny_model)
    assert routing.shape[2] == tokens.shape[1] - 1
    for text, ranks in (("tp2+sp+ep2", 2), ("pp2", 2), ("cp2+ep2", 2)):
        layout = ConfigUnderTest(**parse_layouts(text)[0].to_dict())
        for result in run_ranks(generate_and_replay, ranks, tiny_model, layout):
            assert torch.equal(result[0], tokens) and torch.equal(result[1], routing)
            assert abs(result[2] - loss) < 1e-5


MOE_TYPES = sorted({row["model_type"] for row in verified.records() if row["layout"] == "ep" and row["passed"]})
EXPERT_CHANGES = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}
}
WITHOUT_TOPK = {"phimoe"}


@pytest.mark.parametrize("model_type", sorted(set(MOE_TYPES) & set(causal_types())))
def test_replay_for_every_router_type(model_type):
    """Routers with changed weights select the replayed experts."""
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](**EXPERT_CHANGES.get(model_type, {})))
    model = tiny_model.load().eval()
    batch = {"input_ids": tiny_model.batches[0]["input_ids"]}
    if model_type in WITHOUT_TOPK:
        with pytest.raises(UnsupportedError, match=r"does not select experts with torch\.topk"), record_routing(model):
            model(**batch)
        return
    with record_routing(model) as routing:
        model(**batch)
    flipped_routing = routing.calls[0].flip(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    with replay_routing(model, flipped_routing), record_routing(model) as replayed_routing:
        output = model(**batch)
    assert torch.equal(replayed_routing.calls[0], flipped_routing)
    assert output.logits.isfinite().all()


def test_invalid_routing_raises(tiny_model):
    model = tiny_model.load()
    batch = tiny_model.batches[0]["input_ids"]
    with record_routing(model) as routing:
        model(input_ids=batch)
    recorded = routing.calls[0]
    for wrong, message in (
        (recorded[:-1], "expected integers"),
        (recorded.float(), "expected integers"),
        (recorded + 1000, "expert indices are"),
        (recorded[:, :1], "routing of 1 samples"),
        (recorded[..., :1], "1 experts per token were recorded"),
        (torch.cat([recorded, recorded], 2), "for a call with"),
    ):
        with pytest.raises(ConfigError, match=message), replay_routing(model, wrong):
            model(input_ids=batch)
    with pytest.raises(ConfigError, match="call 2"), replay_routing(model, routing):
        model(input_ids=batch)
        model(input_ids=batch)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("text", [None, "tp2", "dp2+ep2"])
def test_recording_changes_no_gradient(tiny_model, text):
    """Covers layers that are recomputed after the context has exited."""

    def compute_gradient(records):
        config = {} if text is None else {"megatron_config": ConfigUnderTest(**parse_layouts(text)[0].to_dict())}
        model = tiny_model.load(**config).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = {name: value[:1] for name, value in tiny_model.batches[0].items()}
        with record_routing(model) if records else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
        gate = model.model.layers[-1].mlp.gate.weight.grad
        return gate.full_tensor() if isinstance(gate, DTensor) else gate.clone()

    def compute_both():
        return compute_gradient(False), compute_gradient(True)

    for plain, recorded in [compute_both()] if text is None else run_ranks(compute_both, 2):
        assert torch.equal(plain, recorded)


def test_reentrant_checkpoints_raise(tiny_model):
    model = tiny_model.load().train()
    with record_routing(model) as routing:
        model(input_ids=tiny_model.batches[0]["input_ids"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    message = re.escape('Enable it with {"use_reentrant": False}')
    with pytest.raises(UnsupportedError, match=message), replay_routing(model, routing):
        pass
    gradients = []
    for checkpoints in (True, False):
        model.gradient_checkpointing_disable()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with replay_routing(model, routing.joined()):
            model(**tiny_model.batches[0]).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients)


def test_models_without_experts_raise():
    model = make_tiny_model(CONFIG_MAPPING["llama"]()).load()
    with pytest.raises(ConfigError, match="no MoE layers"), record_routing(model):
        pass
