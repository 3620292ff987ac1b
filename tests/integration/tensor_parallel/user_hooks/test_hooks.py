"""Tests of user hooks and replaced functions on sharded activations: equal to a single process, or rejected."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import get_total_norm
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.moe import ExpertsInterface
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from hf_megatron import UnsupportedError, local_named_parameters, shard_safe
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.tensor_parallel.user_hooks import tensor_layouts
from hf_megatron.tensor_parallel.user_hooks.hooks import UserHooks
from hf_megatron.tensor_parallel.user_hooks.tensor_layouts import Addends, Columns
from tests.helpers.training import PatternRuns, count_ranks, make_batch, parse_layout, save_tiny

LAYOUTS = ["tp2", "tp2+sp"]
LAYER = ("", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj")


def make_direction(size):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return vector / vector.norm()


def mix_entries(x):
    """Mixes the tokens and features of each of four samples."""
    if x.dim() == 2:
        return mix_entries(x.unflatten(0, (4, -1))).flatten(0, 1)
    along = make_direction(x.shape[-1])
    x = x + 0.5 * x.mean(1, keepdim=True) + x.cumsum(1) * 0.05
    x = x - 0.5 * (x @ along).unsqueeze(-1) * along
    return x + torch.softmax(x, -1) * x.std((1, 2), keepdim=True)


def apply_to_first(value, function):
    return (function(value[0]), *value[1:]) if isinstance(value, tuple) else function(value)


def train_with_hooks(loop, register, names=LAYER, steps=2):
    # A pipeline rank has the layers of its stage only.
    layer_ids = {name.split(".")[2] for name, _ in local_named_parameters(loop.model) if ".layers." in name}
    local_layers = [loop.model.model.layers[int(number)] for number in sorted(layer_ids)]
    handles = [register(layer.get_submodule(name)) for layer in local_layers for name in names]
    try:
        for seed in range(steps):
            loop.step(seed)
    finally:
        for handle in handles:
            handle.remove()


def make_output_change_pattern(names):
    return lambda loop: train_with_hooks(loop, register_output_change, names)


def register_output_change(module):
    return module.register_forward_hook(lambda module, args, output: apply_to_first(output, mix_entries))


def register_input_change(module):
    def hook(module, args, kwargs):
        if args:
            return (mix_entries(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": mix_entries(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def change_block_outputs(loop):
    train_with_hooks(loop, register_output_change, LAYER)


def change_inner_outputs(loop):
    train_with_hooks(loop, register_output_change, LINEARS)


def change_block_inputs(loop):
    train_with_hooks(loop, register_input_change, LAYER)


def change_inner_inputs(loop):
    train_with_hooks(loop, register_input_change, LINEARS)


def prepend_hooks(loop):
    def register(module):
        return module.register_forward_hook(
            lambda module, args, output: apply_to_first(output, mix_entries), prepend=True
        )

    train_with_hooks(loop, register, LAYER)


def record_statistics(loop):
    def register(module):
        def hook(module, args, kwargs, output):
            value = output[0] if isinstance(output, tuple) else output
            hidden_states = args[0] if args else kwargs["hidden_states"]
            values.append(
                torch.stack([value.mean(), value.std(), value[:, -1].norm(), hidden_states.mean(), hidden_states.std()])
            )

        return module.register_forward_hook(hook, with_kwargs=True)

    values = []
    train_with_hooks(loop, register, (*LAYER, *LINEARS), steps=1)
    loop.see("record_statistics", torch.stack(values))


def edit_outputs_in_place(loop):
    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.add_(value.detach().mean(1, keepdim=True))

        return module.register_forward_hook(hook)

    train_with_hooks(loop, register, ("input_layernorm", "self_attn", "mlp.up_proj", "mlp.down_proj"))


def edit_inputs_in_place(loop):
    """The input of the norm is the residual, so the residual changes as well."""

    def register(module):
        def hook(module, args):
            args[0].add_(args[0].mean(1, keepdim=True))

        return module.register_forward_pre_hook(hook)

    train_with_hooks(loop, register, ("post_attention_layernorm",))


def clip_activation_gradients(loop):
    """Rescales activation gradients by their full norm, and retains them."""
    outputs = []

    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.register_hook(lambda gradient: gradient * 0.05 / gradient.norm())
            value.retain_grad()
            outputs.append(value)

        return module.register_forward_hook(hook)

    train_with_hooks(loop, register, (*LAYER, *LINEARS), steps=1)
    loop.see("norms", torch.stack([value.grad.norm() for value in outputs]))
    loop.see("kept", torch.stack([value.grad.std() for value in outputs]))


def train_hook_parameters(loop):
    """Trains a direction and a low-rank adapter inside hooks; their gradients are complete on every rank."""
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(32, generator=generator).requires_grad_()
    down, up = (torch.randn(*size, generator=generator).mul_(0.3).requires_grad_() for size in ((32, 2), (2, 32)))

    def register(module):
        if module is loop.model.model.layers[0].self_attn.q_proj:
            return module.register_forward_hook(lambda module, args, output: output + args[0] @ down @ up)
        return module.register_forward_hook(
            lambda module, args, output: apply_to_first(output, lambda x: x + vector * x.mean())
        )

    train_with_hooks(loop, register, ("", "mlp", "self_attn.q_proj", "post_attention_layernorm"), steps=1)
    for name, tensor in (("vector", vector), ("down", down), ("up", up)):
        loop.see(name, tensor.grad)


def recompute_layers(loop):
    loop.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        train_with_hooks(loop, register_output_change, (*LAYER, *LINEARS))
        train_with_hooks(loop, register_input_change, ("self_attn", "mlp.down_proj"))
    finally:
        loop.model.gradient_checkpointing_disable()


def change_logits(loop):
    handle = loop.model.lm_head.register_forward_hook(lambda module, args, output: mix_entries(output))
    loop.step(0)
    handle.remove()


def add_noise(loop):
    """Adds noise drawn for full tensors, identical on all ranks regardless of the sharding."""

    def register(module):
        return module.register_forward_hook(
            lambda module, args, output: apply_to_first(output, lambda x: x + torch.rand_like(x) * 0.3)
        )

    torch.manual_seed(7)
    train_with_hooks(loop, register, (*LAYER, *LINEARS))


def apply_shard_safe_hooks(loop):
    """Registers hooks that run on the local shards."""

    def register(module):
        return module.register_forward_hook(shard_safe(lambda module, args, output: apply_to_first(output, torch.sin)))

    train_with_hooks(loop, register, (*LAYER, *LINEARS))


def remove_hooks(loop):
    train_with_hooks(loop, register_output_change, LAYER, steps=1)
    loop.step(1)


EQUAL = {
    loop_pattern.__name__: loop_pattern
    for loop_pattern in (
        change_block_outputs,
        change_inner_outputs,
        change_block_inputs,
        change_inner_inputs,
        prepend_hooks,
        record_statistics,
        edit_outputs_in_place,
        edit_inputs_in_place,
        clip_activation_gradients,
        train_hook_parameters,
        recompute_layers,
        change_logits,
        add_noise,
        apply_shard_safe_hooks,
        remove_hooks,
    )
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hooked")
    save_tiny(path)
    return path


@pytest.fixture(scope="module")
def runs(path):
    return PatternRuns(path, EQUAL)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", EQUAL)
def test_patterns_match_single_process(runs, loop_pattern, text):
    runs.compare(text, loop_pattern)


EXPERT_MODULES = ("", "input_layernorm", "self_attn", "self_attn.v_proj", "mlp", "mlp.gate", "mlp.experts")


def change_expert_outputs(loop):
    train_with_hooks(loop, register_output_change, (*EXPERT_MODULES[:-2], "mlp.experts"))


def record_expert_statistics(loop):
    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.register_hook(lambda gradient: norms.append(gradient.norm()) and None)
            norms.append(value.norm())

        return module.register_forward_hook(hook)

    norms = []
    train_with_hooks(loop, register, EXPERT_MODULES, steps=1)
    loop.see("record_statistics", torch.stack(norms).sort().values)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        tie_word_embeddings=False,
    )
    MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expert_runs(experts):
    return PatternRuns(
        experts,
        {loop_pattern.__name__: loop_pattern for loop_pattern in (change_expert_outputs, record_expert_statistics)},
    )


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", ["change_expert_outputs", "record_expert_statistics"])
def test_patterns_with_experts_match_single_process(expert_runs, loop_pattern, text):
    expert_runs.compare(text, loop_pattern)


OTHER_LAYOUT_PATTERNS = (change_block_outputs, change_inner_inputs)


@pytest.fixture(scope="module")
def reference_runs(path):
    return PatternRuns(path, {loop_pattern.__name__: loop_pattern for loop_pattern in OTHER_LAYOUT_PATTERNS})


@pytest.mark.parametrize("text", ["tp2+pp2", "tp2+sp+pp2", "tp2+dp2"])
@pytest.mark.parametrize("loop_pattern", OTHER_LAYOUT_PATTERNS)
def test_patterns_on_other_layouts_match_single_process(reference_runs, loop_pattern, text):
    reference_runs.compare(text, loop_pattern.__name__)


def skip_hook_gathering(monkeypatch):
    monkeypatch.setattr(UserHooks, "_enter", lambda self, model, args: None)


def skip_gradient_reduction(monkeypatch):
    monkeypatch.setattr(Addends, "close", lambda self, unsharded: unsharded)


def double_count_gradients(monkeypatch):
    monkeypatch.setattr(Addends, "open", lambda self, tensor: tensor)


def shuffle_shards(monkeypatch):
    close = Columns.close
    monkeypatch.setattr(Columns, "close", lambda self, unsharded: close(self, unsharded.flip(-1)))


def sum_token_gradients(monkeypatch):
    gather = tensor_layouts.gather_from_ranks
    monkeypatch.setattr(tensor_layouts, "gather_from_ranks", lambda *arguments: gather(*arguments, sum_gradient=True))


FAULTS = {
    skip_hook_gathering: ("tp2", "change_inner_outputs"),
    skip_gradient_reduction: ("tp2", "change_inner_inputs"),
    double_count_gradients: ("tp2", "train_hook_parameters"),
    shuffle_shards: ("tp2", "change_inner_outputs"),
    sum_token_gradients: ("tp2+sp", "change_block_outputs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_detected(path, runs, fault, monkeypatch):
    text, loop_pattern = FAULTS[fault]
    expected = runs.of(None)
    fault(monkeypatch)
    faulty = PatternRuns(path, {loop_pattern: EQUAL[loop_pattern]})
    run_layout = faulty.of
    faulty.of = lambda parse_layout: expected if parse_layout is None else run_layout(parse_layout)
    with pytest.raises(AssertionError):
        faulty.compare(text, loop_pattern)


def register_global_hook(model):
    register_module_forward_hook(lambda module, args, output: None)


def hook_input_gradient(model):
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: args[0].register_hook(lambda gradient: gradient.clamp(-1, 1)) and None
    )


def replace_attribute(name, value):
    def edit(model):
        owner, _, attribute = name.rpartition(".")
        setattr(model.model.layers[0].get_submodule(owner), attribute, value)

    return edit


def patch_mlp_class(model):
    kind = next(base for base in type(model.model.layers[0].mlp).__mro__ if base.__name__ == "LlamaMLP")
    kind.forward = lambda self, x: self.down_proj(torch.softmax(self.up_proj(x), -1))


def patch_rotary_function(model):
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *args, **kwargs: (q - q.mean(1, keepdim=True), k)


def patch_function(owner, name):
    """Returns an edit that wraps a function called by models or losses."""

    def edit(model):
        stock = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs))

    return edit


def register_custom_experts(model):
    ExpertsInterface.register("mixed", lambda self, hidden_states, *args: hidden_states)
    model.config._experts_implementation = "mixed"


def register_custom_attention(model):
    AttentionInterface.register(
        "mixed", lambda module, query, key, value, mask, **kwargs: (query.transpose(1, 2), None)
    )
    model.config._attn_implementation = "mixed"


def swap_mlp_class(model):
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    forward = {"forward": lambda self, x: kind.forward(self, x) - x.mean(1, keepdim=True)}
    mlp.__class__ = type("Centred", (kind,), forward)


def call_module_in_hook(name, method=None):
    def edit(model):
        layer = model.model.layers[0]
        layer.mlp.register_forward_hook(
            lambda module, args, output: output + getattr(layer.get_submodule(name), method or "__call__")(args[0])
        )

    return edit


def read_weight_in_hook(model):
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output * module.weight.pow(2).mean())


def drop_first_token(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output[:, 1:])


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


REJECTED = {
    "all modules": (register_global_hook, "tp2", "A global forward hook"),
    "input's gradient": (hook_input_gradient, "tp2", "requests the gradient of an input"),
    "softmax for an activation": (
        replace_attribute("mlp.act_fn", nn.Softmax(-1)),
        "tp2",
        "model.layers.0.mlp.act_fn (Softmax instead of",
    ),
    "module of one's own": (replace_attribute("mlp.act_fn", Centred()), "tp2", "mlp.act_fn (Centred instead of"),
    "forward": (replace_attribute("mlp.forward", lambda x: x), "tp2", "model.layers.0.mlp.forward was replaced"),
    "layer's forward": (
        replace_attribute("forward", lambda hidden_states, **_: hidden_states),
        "tp2+sp",
        "layers.0.forward",
    ),
    "norm": (replace_attribute("input_layernorm", Centred()), "tp2+sp", "input_layernorm (Centred instead of"),
    "class of a module": (swap_mlp_class, "tp2", "model.layers.0.mlp.__class__ (Centred) was replaced"),
    "call of a part": (call_module_in_hook("mlp.up_proj"), "tp2", "calls model.layers.0.mlp.up_proj (ColumnParallel"),
    "call of its forward": (call_module_in_hook("mlp", "forward"), "tp2", "calls model.layers.0.mlp.gate_proj (Column"),
    "call of a norm": (call_module_in_hook("input_layernorm"), "tp2+sp", "calls model.layers.0.input_layernorm (Llama"),
    "weight of a norm": (read_weight_in_hook, "tp2+sp", "reads weight of a LlamaRMSNorm"),
    "class": (patch_mlp_class, "tp2", "LlamaMLP.forward was replaced"),
    "function": (patch_rotary_function, "tp2", "modeling_llama.apply_rotary_pos_emb was replaced"),
    "experts": (register_custom_experts, "tp2", "experts_implementation='mixed' was replaced"),
    "attention": (register_custom_attention, "tp2", "attn_implementation='mixed' was replaced"),
    "torch's function": (patch_function(F, "silu"), "tp2", "torch.nn.functional.silu was replaced"),
    "torch's attention": (
        patch_function(F, "scaled_dot_product_attention"),
        "tp2",
        "functional.scaled_dot_product_attention",
    ),
    "torch's loss": (patch_function(F, "cross_entropy"), "tp2", "torch.nn.functional.cross_entropy was replaced"),
    "torch's module": (patch_function(nn.Embedding, "forward"), "tp2", "Embedding.forward was replaced"),
    "transformers' loss": (
        patch_function(loss_utils, "fixed_cross_entropy"),
        "tp2",
        "fixed_cross_entropy was replaced",
    ),
    "other length": (drop_first_token, "tp2+sp", "returned 8 tokens, expected 9"),
}


@pytest.mark.parametrize("what", REJECTED)
def test_unsupported_edits_are_rejected(path, what):
    edit, text, match = REJECTED[what]

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout(text)).train()
        model(**make_batch(0)).loss.backward()
        edit(model)
        with pytest.raises(UnsupportedError, match=re.escape(match)):
            model(**make_batch(0))

    run_ranks(on_rank, 2)


# Modules called alone with full tensors: name -> layouts on which the call matches a single process.
CALLABLE_LAYOUTS = {
    "self_attn.q_proj": [],
    "mlp.gate_proj": [],
    "mlp.down_proj": [],
    "mlp": ["tp2"],
    "input_layernorm": ["tp2"],
}


@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
@pytest.mark.parametrize("name", CALLABLE_LAYOUTS)
def test_modules_called_outside_the_model(path, name, text):
    def penalty(config=None):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        module = model.model.layers[0].get_submodule(name)
        width = module.in_features if isinstance(module, nn.Linear) else model.config.hidden_size
        x = torch.linspace(-1, 1, 2 * 6 * width).reshape(2, 6, width)
        if config is not None and text not in CALLABLE_LAYOUTS[name]:
            with pytest.raises(UnsupportedError, match=rf"layers.0.{name}.* was called outside the model's forward"):
                module(x)
            with pytest.raises(UnsupportedError, match="was called outside the model's forward"):
                copy.deepcopy(model).model.layers[0].get_submodule(name)(x)
            # The model itself still works.
            return model(**make_batch(0)).loss.item(), None
        loss = module(x).pow(2).mean() + model(**make_batch(0)).loss
        loss.backward()
        [(_, parameter), *_] = module.named_parameters()
        gradient = parameter.grad
        return loss.item(), (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).norm().item()

    expected = penalty()
    for loss, norm in run_ranks(lambda: penalty(parse_layout(text)), 2):
        if norm is not None:
            assert (loss, norm) == pytest.approx(expected, rel=1e-5)


def call_stock(stock, *args, **kwargs):
    return stock(*args, **kwargs)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_llama.LlamaMLP, "LlamaMLP.forward"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (F, "scaled_dot_product_attention"),
    ],
)
def test_replacement_before_loading_must_be_shard_safe(path, owner, name):
    def on_rank():
        attribute = name.rpartition(".")[2]
        stock = getattr(owner, attribute)
        # A partial is no method: as a class attribute it would not receive the module.
        wrapper = (lambda *args, **kwargs: stock(*args, **kwargs)) if owner is not F else partial(call_stock, stock)
        setattr(owner, attribute, wrapper)
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2")).train()
        with pytest.raises(UnsupportedError, match=f"{name} was replaced"):
            model(**make_batch(0))
        setattr(owner, attribute, shard_safe(lambda *args, **kwargs: stock(*args, **kwargs)))
        return AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2"))(
            **make_batch(0)
        ).loss.item()

    expected = AutoModelForCausalLM.from_pretrained(path)(**make_batch(0)).loss.item()
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("tp2", "mlp.experts.act_fn", "experts are sharded along their width"),
        ("tp2+sp", "mlp.experts.act_fn", "experts are sharded along their width"),
        ("tp4", "self_attn.k_proj", "several ranks have the same key and value heads"),
    ],
)
def test_unsupported_hooks_are_rejected(experts, text, name, match, register):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(experts, megatron_config=parse_layout(text)).train()
        handle = getattr(model.model.layers[1].get_submodule(name), register)(lambda *_: None)
        if (name, register) != ("self_attn.k_proj", "register_forward_pre_hook"):
            with pytest.raises(UnsupportedError, match=f"hook of model.layers.1.{name} .*{match}"):
                model(**make_batch(0))
            handle.remove()
        model(**make_batch(0)).loss.backward()

    run_ranks(on_rank, count_ranks(parse_layout(text)))


@pytest.mark.parametrize("text", LAYOUTS)
def test_recorded_outputs_include_user_hooks(experts, text):
    """transformers registers its recording hooks in the first forward, after the user hooks."""

    def losses(config=None):
        model = AutoModelForCausalLM.from_pretrained(experts, megatron_config=config).train()
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, output: (output[0] * 1.5, *output[1:]))
        return [model(**make_batch(0), output_router_logits=True).aux_loss.item() for _ in range(3)]

    expected = pytest.approx(losses(), rel=1e-5)
    assert run_ranks(lambda: losses(parse_layout(text)), 2) == [expected] * 2


def test_shard_safe_holds_for_all_axes(path):
    def step(config=None):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        for layer in model.model.layers:
            layer.register_forward_hook(shard_safe(lambda module, args, output: output * 1.5))
            layer.mlp.register_forward_hook(shard_safe(lambda module, args, output: output.tanh()))
        loss = model(**make_batch(0)).loss
        loss.backward()
        return loss.item(), get_total_norm([p.grad for p in model.parameters()]).item()

    expected = pytest.approx(step(), rel=1e-5)
    assert run_ranks(lambda: step(parse_layout("tp2+cp2")), 4) == [expected] * 4


def test_gradients_by_hook_inputs_are_rejected(path):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2+sp")).train()
        hook_inputs = []
        handle = model.model.layers[1].register_forward_hook(lambda module, args, output: hook_inputs.append(args[0]))
        loss = model(**make_batch(0)).loss
        with pytest.raises(UnsupportedError, match="Gradient with respect to an input that was passed to a hook"):
            torch.autograd.grad(loss, hook_inputs)
        handle.remove()
        model(**make_batch(0)).loss.backward()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("tp2+sp", "transformer.h.0.mlp", "would receive only this rank's tokens of a tensor of shape"),
        (
            "tp2",
            "transformer.h.0.self_attention",
            "would receive alibi of this rank's heads only with tp_size > 1. Register it without with_kwargs, or mark "
            "it with hf_megatron.shard_safe if a shard is enough.",
        ),
    ],
)
def test_hooks_with_other_sharded_inputs_are_rejected(tmp_path, text, name, match):
    """BLOOM passes the residual to its MLP, and per-head ALiBi slopes to its attention."""
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)

    def measure(model):
        loss = model.train()(**make_batch(0)).loss
        loss.backward()
        return loss.item(), get_total_norm([p.grad for p in model.parameters()]).item()

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=parse_layout(text)).train()
        handle = model.get_submodule(name).register_forward_hook(lambda *_: None, with_kwargs=True)
        with pytest.raises(UnsupportedError, match=f"forward hook of {name} .*{match}"):
            model(**make_batch(0))
        handle.remove()
        # `shard_safe` declares that local shards suffice.
        model.get_submodule(name).register_forward_hook(shard_safe(lambda *_: None), with_kwargs=True)
        if "alibi" in match:
            model.get_submodule(name).register_forward_hook(lambda *_: None)
        return measure(model)

    expected = measure(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


def scale_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
        layer.mlp.down_proj.forward = shard_safe(
            lambda x, linear=layer.mlp.down_proj: type(linear).forward(linear, x * 0.5)
        )


def copy_with_hook(model):
    duplicate = copy.deepcopy(model)
    duplicate.model.layers[0].mlp.register_forward_hook(lambda module, args, output: mix_entries(output))
    return duplicate


@pytest.mark.parametrize("prepare", [scale_activation, copy_with_hook])
@pytest.mark.parametrize("text", LAYOUTS)
def test_losses_match_single_process(path, prepare, text):
    def loss(config=None):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        plain = model(**make_batch(0)).loss.item()
        model = prepare(model) or model
        return plain, model(**make_batch(0)).loss.item(), model.eval()(**make_batch(0)).loss.item()

    expected = loss()
    assert expected[1] != pytest.approx(expected[0], rel=1e-4)
    for losses in run_ranks(lambda: loss(parse_layout(text)), 2):
        assert losses == pytest.approx(expected, rel=1e-5)
