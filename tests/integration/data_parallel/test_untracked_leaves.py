"""Gradients on dp ranks that go elsewhere than into the model's own parameters, and options of its modules."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import RankError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.training import Loop, PatternRuns, local_samples, make_batch, parse_layout, ranks_of

LAYOUTS = ["dp2", "dp2+zero3"]


def _linear(inputs, outputs):
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs)


def _rows(loop, seed=0):
    return local_samples(loop.model, make_batch(seed))


def _train(loop, other, loss):
    """Two steps of the model's optimizer and of one beside it."""
    optimizer = torch.optim.SGD(other, lr=0.1)
    for seed in range(2):
        loss(seed).backward()
        for each in (loop.optimizer, optimizer):
            each.step()
            each.zero_grad()


def head_after(loop):
    head = _linear(32, 3)

    def loss(seed):
        rows = _rows(loop, seed)
        hidden = loop.model(input_ids=rows["input_ids"], output_hidden_states=True).hidden_states[-1]
        return F.cross_entropy(head(hidden[:, -1]), rows["input_ids"][:, 0] % 3)

    _train(loop, head.parameters(), loss)


def factor_after(loop):
    """A tensor that is no `nn.Parameter`."""
    factor = torch.ones((), requires_grad=True)
    _train(loop, [factor], lambda seed: loop.loss(seed) * factor.exp() - factor)


def model_with(loop):
    other = AutoModelForCausalLM.from_pretrained(loop.path)

    def loss(seed):
        ids = _rows(loop, seed)["input_ids"]
        return F.mse_loss(loop.model(input_ids=ids).logits, other(input_ids=ids).logits)

    _train(loop, other.parameters(), loss)


def _adapted(loop, weights, function, *, checkpoints):
    if checkpoints is not None:
        loop.model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
        loop.model.enable_input_require_grads()
    within = next(module for name, module in loop.model.named_modules() if name.endswith("mlp"))
    handle = within.register_forward_hook(lambda module, args, output: output + function(output))
    try:
        loop.model.requires_grad_(False)
        _train(loop, weights, loop.loss)
    finally:
        handle.remove()
        if checkpoints is not None:
            loop.model.gradient_checkpointing_disable()
            loop.model.disable_input_require_grads()


def adapter_inside(loop):
    adapter = _linear(32, 32)
    _adapted(loop, adapter.parameters(), adapter, checkpoints=None)


def adapter_inside_later(loop):
    loop.step(0)
    loop.step(1)
    adapter_inside(loop)


def adapter_in_recomputed_layers(loop):
    adapter = _linear(32, 32)
    _adapted(loop, adapter.parameters(), adapter, checkpoints=True)


def vector_inside(loop):
    vector = torch.zeros(32, requires_grad=True)
    _adapted(loop, [vector], lambda output: vector, checkpoints=None)


def _hooked(loop, register):
    handle = register(loop.model.model.layers[0])
    try:
        loop.step(0)
    finally:
        handle.remove()


def activation_hook(loop):
    def register(module, args, output):
        output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    _hooked(loop, lambda layer: layer.register_forward_hook(register))


def activation_hook_after(loop):
    output = loop.model(**_rows(loop), output_hidden_states=True)
    output.hidden_states[1].register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def retained_gradient(loop):
    def retain(module, args, output):
        kept.append(output)
        output.retain_grad()

    kept = []
    _hooked(loop, lambda layer: layer.register_forward_hook(retain))


def retained_gradient_after(loop):
    loop.model(**_rows(loop), output_hidden_states=True).hidden_states[1].retain_grad()


def gradient_by_an_activation(loop):
    kept = []
    handle = loop.model.model.layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    loss = loop.loss(0)
    handle.remove()
    torch.autograd.grad(loss, kept)


def module_hook(loop):
    _hooked(loop, lambda layer: layer.mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,)))


def module_pre_hook(loop):
    _hooked(loop, lambda layer: layer.register_full_backward_pre_hook(lambda module, gradients: None))


def _with_option(loop, name, value):
    embedding = loop.model.get_input_embeddings()
    before = getattr(embedding, name)
    setattr(embedding, name, value)
    try:
        loop.step(0)
    finally:
        setattr(embedding, name, before)


def norm_limited(loop):
    _with_option(loop, "max_norm", 0.5)


def scaled_by_frequency(loop):
    _with_option(loop, "scale_grad_by_freq", True)


# What stays possible.


def frozen_embeddings_recomputed(loop):
    """The embeddings' output is a leaf, which requires a gradient that nobody uses."""
    loop.model.get_input_embeddings().requires_grad_(False)
    loop.model.enable_input_require_grads()
    loop.model.gradient_checkpointing_enable({"use_reentrant": True})
    loop.step(0)
    loop.step(1)
    loop.model.gradient_checkpointing_disable()
    loop.model.disable_input_require_grads()
    loop.model.requires_grad_(True)


def frozen_model_with(loop):
    other = AutoModelForCausalLM.from_pretrained(loop.path).requires_grad_(False)
    rows = _rows(loop)
    logits = loop.model(input_ids=rows["input_ids"]).logits
    F.mse_loss(logits, other(input_ids=rows["input_ids"]).logits * 2).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def model_trained_alone(loop):
    """Its loss knows nothing of the laid out model, and every rank has the whole batch."""
    other = AutoModelForCausalLM.from_pretrained(loop.path)
    other.model.layers[0].mlp.register_full_backward_hook(lambda module, new, old: (new[0] * 2,))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(**make_batch(5)).loss.backward()
    optimizer.step()
    loop.see("alone", other.lm_head.weight)
    loop.step(0)


def moved_between_steps(loop):
    loop.step(0)
    loop.model.to("cpu").float()
    loop.step(1)


def hook_that_adds(loop):
    handle = loop.model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.1)
    loop.step(0)
    loop.step(1)
    handle.remove()


def moments_reset_by_parameter(loop):
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


REFUSED = {
    head_after: "is not one of its parameters",
    factor_after: "is not one of its parameters",
    model_with: "is not one of its parameters",
    adapter_inside: "is not one of its parameters",
    adapter_inside_later: "is not one of its parameters",
    adapter_in_recomputed_layers: "is not one of its parameters",
    vector_inside: "is not one of its parameters",
    activation_hook: "gradient of an activation",
    activation_hook_after: "gradient of an activation",
    retained_gradient: "retain_grad() of an activation",
    retained_gradient_after: "retain_grad() of an activation",
    gradient_by_an_activation: "torch.autograd.grad with respect to",
    module_hook: "A backward hook of a module",
    module_pre_hook: "A backward hook of a module",
    norm_limited: "model.embed_tokens.max_norm = 0.5",
    scaled_by_frequency: "model.embed_tokens.scale_grad_by_freq = True",
}
EQUAL = (
    frozen_embeddings_recomputed,
    frozen_model_with,
    hook_that_adds,
    model_trained_alone,
    moments_reset_by_parameter,
    moved_between_steps,
)


# Raised in the middle of a forward or of the recomputation of one, from which FSDP2 does not come back.
IN_THE_MIDDLE = (activation_hook, retained_gradient, adapter_in_recomputed_layers)


@pytest.fixture(scope="module")
def runs(tiny):
    together = {
        loop_pattern.__name__: loop_pattern for loop_pattern in (*EQUAL, *REFUSED) if loop_pattern not in IN_THE_MIDDLE
    }
    return {
        **dict.fromkeys((*EQUAL, *REFUSED), PatternRuns(tiny, together)),
        **{loop_pattern: PatternRuns(tiny, {loop_pattern.__name__: loop_pattern}) for loop_pattern in IN_THE_MIDDLE},
    }


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", REFUSED)
def test_refused(runs, loop_pattern, text):
    runs[loop_pattern].refused(text, loop_pattern.__name__, REFUSED[loop_pattern])


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", EQUAL)
def test_equal(runs, loop_pattern, text):
    runs[loop_pattern].compare(text, loop_pattern.__name__)


OF_SPLIT_LAYERS = {
    module_hook: "A backward hook of a module",
    norm_limited: "Sharded embeddings do not support max_norm",
    scaled_by_frequency: "Sharded embeddings do not support max_norm",
}


@pytest.fixture(scope="module")
def split_runs(tiny):
    return PatternRuns(
        tiny, {loop_pattern.__name__: loop_pattern for loop_pattern in (*OF_SPLIT_LAYERS, moments_reset_by_parameter)}
    )


@pytest.mark.parametrize("loop_pattern", OF_SPLIT_LAYERS)
def test_refused_where_layers_are_split(split_runs, loop_pattern):
    split_runs.refused("tp2", loop_pattern.__name__, OF_SPLIT_LAYERS[loop_pattern])


def test_state_by_parameter_where_layers_are_split(split_runs):
    split_runs.compare("tp2", "moments_reset_by_parameter")


# In a pipeline a stage's graph is differentiated by the schedule.
OF_STAGES = {
    "pp2": {scaled_by_frequency: "model.embed_tokens.scale_grad_by_freq = True"},
    "pp2+dp2": {adapter_inside: "is not one of its parameters", activation_hook: "gradient of an activation"},
}


@pytest.mark.parametrize(
    ("text", "loop_pattern"),
    [(text, loop_pattern) for text, loop_patterns in OF_STAGES.items() for loop_pattern in loop_patterns],
)
def test_refused_over_stages(tiny, text, loop_pattern):
    """By the rank that has the module; the others are told that it failed."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        loop_pattern(Loop(model, tiny))

    with pytest.raises(RankError, match=re.escape(OF_STAGES[text][loop_pattern])):
        run_ranks(on_rank, ranks_of(parse_layout(text)), timeout=120)


@pytest.mark.parametrize("stepped", [False, True])
def test_tying_and_untying_are_refused_in_stage_3(tiny, stepped):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2+zero3")).train()
        assert parallel_state(model).mesh.dp_size == 2
        if stepped:
            model(**local_samples(model, make_batch(0))).loss.backward()
        weight = model.lm_head.weight
        assert weight is model.model.embed_tokens.weight
        model.lm_head.weight = nn.Parameter(weight.detach().clone())
        with pytest.raises(UnsupportedError, match="tied, untied or replaced"):
            model(**local_samples(model, make_batch(1)))
        model.lm_head.weight = weight
        norms = model.model.layers[0]
        norms.input_layernorm.weight = norms.post_attention_layernorm.weight
        with pytest.raises(UnsupportedError, match="tied, untied or replaced"):
            model(**local_samples(model, make_batch(1)))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("other", ["pp2", None])
def test_models_without_replicas_train_while_one_with_replicas_lives(tiny, other):
    def on_rank():
        with_replicas = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2"))
        config = None if other is None else parse_layout(other)
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        if config is None:
            # Its backwards run inside of a backward.
            model.gradient_checkpointing_enable({"use_reentrant": True})
            model.enable_input_require_grads()
        model(**make_batch(0)).loss.backward()
        gradients = sum(parameter.grad is not None for parameter in model.parameters())
        return gradients, all(parameter.grad is None for parameter in with_replicas.parameters())

    for gradients, untouched in run_ranks(on_rank, 2):
        assert gradients and untouched
