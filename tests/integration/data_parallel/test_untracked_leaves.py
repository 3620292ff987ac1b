"""Tests of gradients on dp ranks that flow into tensors other than the model's parameters, and of module options."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import RankError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.training import Loop, PatternRuns, count_ranks, make_batch, parse_layout, shard_batch

LAYOUTS = ["dp2", "dp2+zero3"]


def _make_linear(inputs, outputs):
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs)


def _local_batch(loop, seed=0):
    return shard_batch(loop.model, make_batch(seed))


def _train_with_extra_optimizer(loop, other, loss):
    """Takes two steps of the model's optimizer and of a second one for the parameters `other`."""
    optimizer = torch.optim.SGD(other, lr=0.1)
    for seed in range(2):
        loss(seed).backward()
        for each in (loop.optimizer, optimizer):
            each.step()
            each.zero_grad()


def train_head_after(loop):
    head = _make_linear(32, 3)

    def loss(seed):
        rows = _local_batch(loop, seed)
        hidden = loop.model(input_ids=rows["input_ids"], output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(head(hidden[:, -1]), rows["input_ids"][:, 0] % 3)

    _train_with_extra_optimizer(loop, head.parameters(), loss)


def train_factor_after(loop):
    """Trains a tensor that is not an `nn.Parameter`."""
    factor = torch.ones((), requires_grad=True)
    _train_with_extra_optimizer(loop, [factor], lambda seed: loop.loss(seed) * factor.exp() - factor)


def train_second_model(loop):
    other = AutoModelForCausalLM.from_pretrained(loop.path)

    def loss(seed):
        ids = _local_batch(loop, seed)["input_ids"]
        return F.mse_loss(loop.model(input_ids=ids).logits, other(input_ids=ids).logits)

    _train_with_extra_optimizer(loop, other.parameters(), loss)


def _train_adapted(loop, weights, function, *, checkpoints):
    if checkpoints is not None:
        loop.model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        loop.model.enable_input_require_grads()
    mlp = next(module for name, module in loop.model.named_modules() if name.endswith("mlp"))
    handle = mlp.register_forward_hook(lambda module, args, output: output + function(output))
    try:
        loop.model.requires_grad_(False)
        _train_with_extra_optimizer(loop, weights, loop.loss)
    finally:
        handle.remove()
        if checkpoints is not None:
            loop.model.gradient_checkpointing_disable()
            loop.model.disable_input_require_grads()


def train_inner_adapter(loop):
    adapter = _make_linear(32, 32)
    _train_adapted(loop, adapter.parameters(), adapter, checkpoints=None)


def train_inner_adapter_later(loop):
    loop.step(0)
    loop.step(1)
    train_inner_adapter(loop)


def train_adapter_in_recomputed_layers(loop):
    adapter = _make_linear(32, 32)
    _train_adapted(loop, adapter.parameters(), adapter, checkpoints=True)


def train_inner_vector(loop):
    vector = torch.zeros(32, requires_grad=True)
    _train_adapted(loop, [vector], lambda output: vector, checkpoints=None)


def _step_with_hook(loop, register):
    handle = register(loop.model.model.layers[0])
    try:
        loop.step(0)
    finally:
        handle.remove()


def hook_activation(loop):
    def register(module, args, output):
        output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    _step_with_hook(loop, lambda layer: layer.register_forward_hook(register))


def hook_activation_after_forward(loop):
    output = loop.model(**_local_batch(loop), output_hidden_states=True)
    output.hidden_states[1].register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def retain_activation_gradient(loop):
    def retain(module, args, output):
        outputs.append(output)
        output.retain_grad()

    outputs = []
    _step_with_hook(loop, lambda layer: layer.register_forward_hook(retain))


def retain_gradient_after_forward(loop):
    loop.model(**_local_batch(loop), output_hidden_states=True).hidden_states[1].retain_grad()


def differentiate_by_activation(loop):
    outputs = []
    handle = loop.model.model.layers[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = loop.loss(0)
    handle.remove()
    torch.autograd.grad(loss, outputs)


def add_backward_hook(loop):
    _step_with_hook(loop, lambda layer: layer.mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,)))


def add_backward_pre_hook(loop):
    _step_with_hook(loop, lambda layer: layer.register_full_backward_pre_hook(lambda module, gradients: None))


def _step_with_option(loop, name, value):
    embedding = loop.model.get_input_embeddings()
    before = getattr(embedding, name)
    setattr(embedding, name, value)
    try:
        loop.step(0)
    finally:
        setattr(embedding, name, before)


def set_max_norm(loop):
    _step_with_option(loop, "max_norm", 0.5)


def scale_gradient_by_frequency(loop):
    _step_with_option(loop, "scale_grad_by_freq", True)


# Supported patterns.


def recompute_with_frozen_embeddings(loop):
    """The output of the embeddings is a leaf that requires a gradient, which is unused."""
    loop.model.get_input_embeddings().requires_grad_(False)
    loop.model.enable_input_require_grads()
    loop.model.gradient_checkpointing_enable({"use_reentrant": True})
    loop.step(0)
    loop.step(1)
    loop.model.gradient_checkpointing_disable()
    loop.model.disable_input_require_grads()
    loop.model.requires_grad_(True)


def use_frozen_second_model(loop):
    other = AutoModelForCausalLM.from_pretrained(loop.path).requires_grad_(False)
    rows = _local_batch(loop)
    logits = loop.model(input_ids=rows["input_ids"]).logits
    F.mse_loss(logits, other(input_ids=rows["input_ids"]).logits * 2).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def train_separate_model(loop):
    """The loss of the second model does not involve the parallelized model, and every rank has the global batch."""
    other = AutoModelForCausalLM.from_pretrained(loop.path)
    other.model.layers[0].mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(**make_batch(5)).loss.backward()
    optimizer.step()
    loop.see("alone", other.lm_head.weight)
    loop.step(0)


def move_between_steps(loop):
    loop.step(0)
    loop.model.to("cpu").float()
    loop.step(1)


def scale_layer_output(loop):
    handle = loop.model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.1)
    loop.step(0)
    loop.step(1)
    handle.remove()


def reset_moments_by_parameter(loop):
    optimizer = loop.prepare(loop.model.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-4)
    for seed in range(3):
        loop.backward(seed)
        optimizer.step()
        optimizer.zero_grad()
        if seed == 1:
            for parameter in loop.model.parameters():
                assert parameter in optimizer.state
                optimizer.state[parameter]["exp_avg"].zero_()
                assert optimizer.state.get(parameter)["step"] == 2
            assert len(optimizer.state) == len(list(loop.model.parameters()))
        if seed == 0:
            optimizer.load_state_dict(optimizer.state_dict())
    del optimizer.state[loop.model.lm_head.weight]
    assert loop.model.lm_head.weight not in optimizer.state


REJECTED = {
    train_head_after: "is not one of its parameters",
    train_factor_after: "is not one of its parameters",
    train_second_model: "is not one of its parameters",
    train_inner_adapter: "is not one of its parameters",
    train_inner_adapter_later: "is not one of its parameters",
    train_adapter_in_recomputed_layers: "is not one of its parameters",
    train_inner_vector: "is not one of its parameters",
    hook_activation: "gradient of an activation",
    hook_activation_after_forward: "gradient of an activation",
    retain_activation_gradient: "retain_grad() of an activation",
    retain_gradient_after_forward: "retain_grad() of an activation",
    differentiate_by_activation: "torch.autograd.grad with respect to",
    add_backward_hook: "A backward hook of a module",
    add_backward_pre_hook: "A backward hook of a module",
    set_max_norm: "model.embed_tokens.max_norm = 0.5",
    scale_gradient_by_frequency: "model.embed_tokens.scale_grad_by_freq = True",
}
EQUAL = (
    recompute_with_frozen_embeddings,
    use_frozen_second_model,
    scale_layer_output,
    train_separate_model,
    reset_moments_by_parameter,
    move_between_steps,
)


# These raise in the middle of a forward or of its recomputation, after which FSDP2 cannot continue.
IN_THE_MIDDLE = (hook_activation, retain_activation_gradient, train_adapter_in_recomputed_layers)


@pytest.fixture(scope="module")
def runs(tiny):
    together = {
        loop_pattern.__name__: loop_pattern for loop_pattern in (*EQUAL, *REJECTED) if loop_pattern not in IN_THE_MIDDLE
    }
    return {
        **dict.fromkeys((*EQUAL, *REJECTED), PatternRuns(tiny, together)),
        **{loop_pattern: PatternRuns(tiny, {loop_pattern.__name__: loop_pattern}) for loop_pattern in IN_THE_MIDDLE},
    }


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", REJECTED)
def test_untracked_gradients_are_rejected(runs, loop_pattern, text):
    runs[loop_pattern].refused(text, loop_pattern.__name__, REJECTED[loop_pattern])


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", EQUAL)
def test_patterns_match_single_process(runs, loop_pattern, text):
    runs[loop_pattern].compare(text, loop_pattern.__name__)


REJECTED_WITH_SPLIT_LAYERS = {
    add_backward_hook: "A backward hook of a module",
    set_max_norm: "Sharded embeddings do not support max_norm",
    scale_gradient_by_frequency: "Sharded embeddings do not support max_norm",
}


@pytest.fixture(scope="module")
def split_runs(tiny):
    return PatternRuns(
        tiny,
        {
            loop_pattern.__name__: loop_pattern
            for loop_pattern in (*REJECTED_WITH_SPLIT_LAYERS, reset_moments_by_parameter)
        },
    )


@pytest.mark.parametrize("loop_pattern", REJECTED_WITH_SPLIT_LAYERS)
def test_rejected_with_tensor_parallelism(split_runs, loop_pattern):
    split_runs.refused("tp2", loop_pattern.__name__, REJECTED_WITH_SPLIT_LAYERS[loop_pattern])


def test_optimizer_state_with_tensor_parallelism(split_runs):
    split_runs.compare("tp2", "reset_moments_by_parameter")


# The pipeline schedule differentiates the graph of each stage.
REJECTED_ON_STAGES = {
    "pp2": {scale_gradient_by_frequency: "model.embed_tokens.scale_grad_by_freq = True"},
    "pp2+dp2": {train_inner_adapter: "is not one of its parameters", hook_activation: "gradient of an activation"},
}


@pytest.mark.parametrize(
    ("text", "loop_pattern"),
    [(text, loop_pattern) for text, loop_patterns in REJECTED_ON_STAGES.items() for loop_pattern in loop_patterns],
)
def test_rejected_with_pipeline(tiny, text, loop_pattern):
    """The rank that owns the module raises, and the error is propagated to the other ranks."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        loop_pattern(Loop(model, tiny))

    with pytest.raises(RankError, match=re.escape(REJECTED_ON_STAGES[text][loop_pattern])):
        run_ranks(on_rank, count_ranks(parse_layout(text)), timeout=120)


@pytest.mark.parametrize("stepped", [False, True])
def test_zero_stage_3_rejects_retied_weights(tiny, stepped):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2+zero3")).train()
        assert parallel_state(model).mesh.dp_size == 2
        if stepped:
            model(**shard_batch(model, make_batch(0))).loss.backward()
        weight = model.lm_head.weight
        assert weight is model.model.embed_tokens.weight
        model.lm_head.weight = nn.Parameter(weight.detach().clone())
        with pytest.raises(UnsupportedError, match="tied, untied or replaced"):
            model(**shard_batch(model, make_batch(1)))
        model.lm_head.weight = weight
        norms = model.model.layers[0]
        norms.input_layernorm.weight = norms.post_attention_layernorm.weight
        with pytest.raises(UnsupportedError, match="tied, untied or replaced"):
            model(**shard_batch(model, make_batch(1)))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("other", ["pp2", None])
def test_model_without_dp_trains_next_to_dp_model(tiny, other):
    def on_rank():
        with_replicas = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2"))
        config = None if other is None else parse_layout(other)
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        if config is None:
            # Reentrant checkpointing runs its backwards inside a backward.
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        model(**make_batch(0)).loss.backward()
        gradients = sum(parameter.grad is not None for parameter in model.parameters())
        return gradients, all(parameter.grad is None for parameter in with_replicas.parameters())

    for gradients, untouched in run_ranks(on_rank, 2):
        assert gradients and untouched
