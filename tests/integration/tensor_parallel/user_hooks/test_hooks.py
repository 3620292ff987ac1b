"""Forward hooks and exchanged functions that look across entries of split tensors: as in one process, or refused."""

import copy
import re

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
from tests.helpers.training import PatternRuns, make_batch, parse_layout, ranks_of, save_tiny

LAYOUTS = ["tp2", "tp2+sp"]
LAYER = ("", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj")


def direction(size):
    vector = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return vector / vector.norm()


def change(x):
    """Looks across the tokens and features of each of four rows."""
    if x.dim() == 2:
        return change(x.unflatten(0, (4, -1))).flatten(0, 1)
    along = direction(x.shape[-1])
    x = x + 0.5 * x.mean(1, keepdim=True) + x.cumsum(1) * 0.05
    x = x - 0.5 * (x @ along).unsqueeze(-1) * along
    return x + torch.softmax(x, -1) * x.std((1, 2), keepdim=True)


def first(value, function):
    return (function(value[0]), *value[1:]) if isinstance(value, tuple) else function(value)


def with_hooks(loop, register, names=LAYER, steps=2):
    # A pipeline's rank has its own layers alone.
    numbers = {name.split(".")[2] for name, _ in local_named_parameters(loop.model) if ".layers." in name}
    own = [loop.model.model.layers[int(number)] for number in sorted(numbers)]
    handles = [register(layer.get_submodule(name)) for layer in own for name in names]
    try:
        for seed in range(steps):
            loop.step(seed)
    finally:
        for handle in handles:
            handle.remove()


def changed_outputs(names):
    return lambda loop: with_hooks(loop, _changing_output, names)


def _changing_output(module):
    return module.register_forward_hook(lambda module, args, output: first(output, change))


def _changing_input(module):
    def hook(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def outputs_of_blocks(loop):
    with_hooks(loop, _changing_output, LAYER)


def outputs_inside(loop):
    with_hooks(loop, _changing_output, LINEARS)


def inputs_of_blocks(loop):
    with_hooks(loop, _changing_input, LAYER)


def inputs_inside(loop):
    with_hooks(loop, _changing_input, LINEARS)


def prepended(loop):
    def register(module):
        return module.register_forward_hook(lambda module, args, output: first(output, change), prepend=True)

    with_hooks(loop, register, LAYER)


def statistics(loop):
    def register(module):
        def hook(module, args, kwargs, output):
            value = output[0] if isinstance(output, tuple) else output
            given = args[0] if args else kwargs["hidden_states"]
            found.append(torch.stack([value.mean(), value.std(), value[:, -1].norm(), given.mean(), given.std()]))

        return module.register_forward_hook(hook, with_kwargs=True)

    found = []
    with_hooks(loop, register, (*LAYER, *LINEARS), steps=1)
    loop.see("statistics", torch.stack(found))


def edits_in_place(loop):
    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.add_(value.detach().mean(1, keepdim=True))

        return module.register_forward_hook(hook)

    with_hooks(loop, register, ("input_layernorm", "self_attn", "mlp.up_proj", "mlp.down_proj"))


def edited_inputs(loop):
    """The residual, which the norm's input is, changes as well."""

    def register(module):
        def hook(module, args):
            args[0].add_(args[0].mean(1, keepdim=True))

        return module.register_forward_pre_hook(hook)

    with_hooks(loop, register, ("post_attention_layernorm",))


def gradients_of_activations(loop):
    """Clipped by the norm of all entries, and kept."""
    kept = []

    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.register_hook(lambda gradient: gradient * 0.05 / gradient.norm())
            value.retain_grad()
            kept.append(value)

        return module.register_forward_hook(hook)

    with_hooks(loop, register, (*LAYER, *LINEARS), steps=1)
    loop.see("norms", torch.stack([value.grad.norm() for value in kept]))
    loop.see("kept", torch.stack([value.grad.std() for value in kept]))


def trained_inside(loop):
    """A trained direction and a low-rank adapter beside a linear: their gradients are whole on every rank."""
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(32, generator=generator).requires_grad_()
    down, up = (torch.randn(*size, generator=generator).mul_(0.3).requires_grad_() for size in ((32, 2), (2, 32)))

    def register(module):
        if module is loop.model.model.layers[0].self_attn.q_proj:
            return module.register_forward_hook(lambda module, args, output: output + args[0] @ down @ up)
        return module.register_forward_hook(lambda module, args, output: first(output, lambda x: x + vector * x.mean()))

    with_hooks(loop, register, ("", "mlp", "self_attn.q_proj", "post_attention_layernorm"), steps=1)
    for name, tensor in (("vector", vector), ("down", down), ("up", up)):
        loop.see(name, tensor.grad)


def recomputed(loop):
    loop.model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        with_hooks(loop, _changing_output, (*LAYER, *LINEARS))
        with_hooks(loop, _changing_input, ("self_attn", "mlp.down_proj"))
    finally:
        loop.model.gradient_checkpointing_disable()


def logits(loop):
    handle = loop.model.lm_head.register_forward_hook(lambda module, args, output: change(output))
    loop.step(0)
    handle.remove()


def noise(loop):
    """Drawn for whole tensors: alike on all ranks, whatever is split."""

    def register(module):
        return module.register_forward_hook(
            lambda module, args, output: first(output, lambda x: x + torch.rand_like(x) * 0.3)
        )

    torch.manual_seed(7)
    with_hooks(loop, register, (*LAYER, *LINEARS))


def marked(loop):
    """Given what the rank has."""

    def register(module):
        return module.register_forward_hook(shard_safe(lambda module, args, output: first(output, torch.sin)))

    with_hooks(loop, register, (*LAYER, *LINEARS))


def removed(loop):
    with_hooks(loop, _changing_output, LAYER, steps=1)
    loop.step(1)


EQUAL = {
    loop_pattern.__name__: loop_pattern
    for loop_pattern in (
        outputs_of_blocks,
        outputs_inside,
        inputs_of_blocks,
        inputs_inside,
        prepended,
        statistics,
        edits_in_place,
        edited_inputs,
        gradients_of_activations,
        trained_inside,
        recomputed,
        logits,
        noise,
        marked,
        removed,
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
def test_equal(runs, loop_pattern, text):
    runs.compare(text, loop_pattern)


OF_EXPERTS = ("", "input_layernorm", "self_attn", "self_attn.v_proj", "mlp", "mlp.gate", "mlp.experts")


def experts_outputs(loop):
    with_hooks(loop, _changing_output, (*OF_EXPERTS[:-2], "mlp.experts"))


def experts_statistics(loop):
    def register(module):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            value.register_hook(lambda gradient: found.append(gradient.norm()) and None)
            found.append(value.norm())

        return module.register_forward_hook(hook)

    found = []
    with_hooks(loop, register, OF_EXPERTS, steps=1)
    loop.see("statistics", torch.stack(found).sort().values)


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
        experts, {loop_pattern.__name__: loop_pattern for loop_pattern in (experts_outputs, experts_statistics)}
    )


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("loop_pattern", ["experts_outputs", "experts_statistics"])
def test_equal_with_experts(expert_runs, loop_pattern, text):
    expert_runs.compare(text, loop_pattern)


ELSEWHERE = (outputs_of_blocks, inputs_inside)


@pytest.fixture(scope="module")
def reference_runs(path):
    return PatternRuns(path, {loop_pattern.__name__: loop_pattern for loop_pattern in ELSEWHERE})


@pytest.mark.parametrize("text", ["tp2+pp2", "tp2+sp+pp2", "tp2+dp2"])
@pytest.mark.parametrize("loop_pattern", ELSEWHERE)
def test_equal_on_other_layouts(reference_runs, loop_pattern, text):
    reference_runs.compare(text, loop_pattern.__name__)


def no_hooks(monkeypatch):
    monkeypatch.setattr(UserHooks, "_enter", lambda self, model, args: None)


def gradients_not_summed(monkeypatch):
    monkeypatch.setattr(Addends, "close", lambda self, unsharded: unsharded)


def gradients_counted_twice(monkeypatch):
    monkeypatch.setattr(Addends, "open", lambda self, tensor: tensor)


def parts_in_wrong_places(monkeypatch):
    close = Columns.close
    monkeypatch.setattr(Columns, "close", lambda self, unsharded: close(self, unsharded.flip(-1)))


def tokens_added_up(monkeypatch):
    gather = tensor_layouts.gather_from_ranks
    monkeypatch.setattr(tensor_layouts, "gather_from_ranks", lambda *arguments: gather(*arguments, sum_gradient=True))


FAULTS = {
    no_hooks: ("tp2", "outputs_inside"),
    gradients_not_summed: ("tp2", "inputs_inside"),
    gradients_counted_twice: ("tp2", "trained_inside"),
    parts_in_wrong_places: ("tp2", "outputs_inside"),
    tokens_added_up: ("tp2+sp", "outputs_of_blocks"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(path, runs, fault, monkeypatch):
    text, loop_pattern = FAULTS[fault]
    expected = runs.of(None)
    fault(monkeypatch)
    faulty = PatternRuns(path, {loop_pattern: EQUAL[loop_pattern]})
    of = faulty.of
    faulty.of = lambda parse_layout: expected if parse_layout is None else of(parse_layout)
    with pytest.raises(AssertionError):
        faulty.compare(text, loop_pattern)


def hook_of_all_modules(model):
    register_module_forward_hook(lambda module, args, output: None)


def gradient_of_an_input(model):
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda module, args: args[0].register_hook(lambda gradient: gradient.clamp(-1, 1)) and None
    )


def exchanged(name, value):
    def change(model):
        owner, _, attribute = name.rpartition(".")
        setattr(model.model.layers[0].get_submodule(owner), attribute, value)

    return change


def patched_class(model):
    kind = next(base for base in type(model.model.layers[0].mlp).__mro__ if base.__name__ == "LlamaMLP")
    kind.forward = lambda self, x: self.down_proj(torch.softmax(self.up_proj(x), -1))


def patched_function(model):
    modeling_llama.apply_rotary_pos_emb = lambda q, k, *args, **kwargs: (q - q.mean(1, keepdim=True), k)


def patched(owner, name):
    """Puts a function of one's own in the place of one that models or losses call."""

    def change(model):
        stock = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs))

    return change


def experts_of_ones_own(model):
    ExpertsInterface.register("mixed", lambda self, hidden_states, *args: hidden_states)
    model.config._experts_implementation = "mixed"


def attention_of_ones_own(model):
    AttentionInterface.register(
        "mixed", lambda module, query, key, value, mask, **kwargs: (query.transpose(1, 2), None)
    )
    model.config._attn_implementation = "mixed"


def other_class(model):
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    forward = {"forward": lambda self, x: kind.forward(self, x) - x.mean(1, keepdim=True)}
    mlp.__class__ = type("Centred", (kind,), forward)


def called_by_a_hook(name, method=None):
    def change(model):
        layer = model.model.layers[0]
        layer.mlp.register_forward_hook(
            lambda module, args, output: output + getattr(layer.get_submodule(name), method or "__call__")(args[0])
        )

    return change


def weight_in_a_hook(model):
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output * module.weight.pow(2).mean())


def shorter(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output[:, 1:])


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


REFUSED = {
    "all modules": (hook_of_all_modules, "tp2", "A global forward hook"),
    "input's gradient": (gradient_of_an_input, "tp2", "requests the gradient of an input"),
    "softmax for an activation": (
        exchanged("mlp.act_fn", nn.Softmax(-1)),
        "tp2",
        "model.layers.0.mlp.act_fn (Softmax instead of",
    ),
    "module of one's own": (exchanged("mlp.act_fn", Centred()), "tp2", "mlp.act_fn (Centred instead of"),
    "forward": (exchanged("mlp.forward", lambda x: x), "tp2", "model.layers.0.mlp.forward was replaced"),
    "layer's forward": (exchanged("forward", lambda hidden_states, **_: hidden_states), "tp2+sp", "layers.0.forward"),
    "norm": (exchanged("input_layernorm", Centred()), "tp2+sp", "input_layernorm (Centred instead of"),
    "class of a module": (other_class, "tp2", "model.layers.0.mlp.__class__ (Centred) was replaced"),
    "call of a part": (called_by_a_hook("mlp.up_proj"), "tp2", "calls model.layers.0.mlp.up_proj (ColumnParallel"),
    "call of its forward": (called_by_a_hook("mlp", "forward"), "tp2", "calls model.layers.0.mlp.gate_proj (Column"),
    "call of a norm": (called_by_a_hook("input_layernorm"), "tp2+sp", "calls model.layers.0.input_layernorm (Llama"),
    "weight of a norm": (weight_in_a_hook, "tp2+sp", "reads weight of a LlamaRMSNorm"),
    "class": (patched_class, "tp2", "LlamaMLP.forward was replaced"),
    "function": (patched_function, "tp2", "modeling_llama.apply_rotary_pos_emb was replaced"),
    "experts": (experts_of_ones_own, "tp2", "experts_implementation='mixed' was replaced"),
    "attention": (attention_of_ones_own, "tp2", "attn_implementation='mixed' was replaced"),
    "torch's function": (patched(F, "silu"), "tp2", "torch.nn.functional.silu was replaced"),
    "torch's attention": (patched(F, "scaled_dot_product_attention"), "tp2", "functional.scaled_dot_product_attention"),
    "torch's loss": (patched(F, "cross_entropy"), "tp2", "torch.nn.functional.cross_entropy was replaced"),
    "torch's module": (patched(nn.Embedding, "forward"), "tp2", "Embedding.forward was replaced"),
    "transformers' loss": (patched(loss_utils, "fixed_cross_entropy"), "tp2", "fixed_cross_entropy was replaced"),
    "other length": (shorter, "tp2+sp", "returned 8 tokens, expected 9"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(path, what):
    change, text, match = REFUSED[what]

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout(text)).train()
        model(**make_batch(0)).loss.backward()
        change(model)
        with pytest.raises(UnsupportedError, match=re.escape(match)):
            model(**make_batch(0))

    run_ranks(on_rank, 2)


# Called by themselves with whole tensors: name -> the layouts on which that is one process's call.
CALLED = {
    "self_attn.q_proj": [],
    "mlp.gate_proj": [],
    "mlp.down_proj": [],
    "mlp": ["tp2"],
    "input_layernorm": ["tp2"],
}


@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
@pytest.mark.parametrize("name", CALLED)
def test_modules_called_outside_of_the_model(path, name, text):
    def penalty(config=None):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        module = model.model.layers[0].get_submodule(name)
        width = module.in_features if isinstance(module, nn.Linear) else model.config.hidden_size
        x = torch.linspace(-1, 1, 2 * 6 * width).reshape(2, 6, width)
        if config is not None and text not in CALLED[name]:
            with pytest.raises(UnsupportedError, match=rf"layers.0.{name}.* was called outside the model's forward"):
                module(x)
            with pytest.raises(UnsupportedError, match="was called outside the model's forward"):
                copy.deepcopy(model).model.layers[0].get_submodule(name)(x)
            # The model itself goes on.
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


@pytest.mark.parametrize("name", ["LlamaMLP.forward", "apply_rotary_pos_emb"])
def test_what_was_exchanged_before_loading_is_refused_unless_it_is_marked(path, name):
    def on_rank():
        owner = modeling_llama.LlamaMLP if "." in name else modeling_llama
        attribute = name.rpartition(".")[2]
        stock = getattr(owner, attribute)
        setattr(owner, attribute, lambda *args, **kwargs: stock(*args, **kwargs))
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
def test_refused_by_name(experts, text, name, match, register):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(experts, megatron_config=parse_layout(text)).train()
        handle = getattr(model.model.layers[1].get_submodule(name), register)(lambda *_: None)
        if (name, register) != ("self_attn.k_proj", "register_forward_pre_hook"):
            with pytest.raises(UnsupportedError, match=f"hook of model.layers.1.{name} .*{match}"):
                model(**make_batch(0))
            handle.remove()
        model(**make_batch(0)).loss.backward()

    run_ranks(on_rank, ranks_of(parse_layout(text)))


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_is_recorded_has_gone_through_hooks_in_every_forward(experts, text):
    """transformers registers what it records with in the first forward, behind hooks of users."""

    def losses(config=None):
        model = AutoModelForCausalLM.from_pretrained(experts, megatron_config=config).train()
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, output: (output[0] * 1.5, *output[1:]))
        return [model(**make_batch(0), output_router_logits=True).aux_loss.item() for _ in range(3)]

    expected = pytest.approx(losses(), rel=1e-5)
    assert run_ranks(lambda: losses(parse_layout(text)), 2) == [expected] * 2


def test_a_mark_holds_for_all_axes(path):
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


def test_gradients_by_what_a_hook_was_given_are_refused(path):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2+sp")).train()
        given = []
        handle = model.model.layers[1].register_forward_hook(lambda module, args, output: given.append(args[0]))
        loss = model(**make_batch(0)).loss
        with pytest.raises(UnsupportedError, match="Gradient with respect to an input that was passed to a hook"):
            torch.autograd.grad(loss, given)
        handle.remove()
        model(**make_batch(0)).loss.backward()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("text", "name", "match"),
    [
        ("tp2+sp", "transformer.h.0.mlp", "would receive only this rank's tokens of a tensor of shape"),
        ("tp2", "transformer.h.0.self_attention", "would receive alibi of this rank's heads"),
    ],
)
def test_hooks_that_are_given_other_parts_are_refused(tmp_path, text, name, match):
    """BLOOM's MLP is called with the residual, and its attention with a slope for each head."""
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=parse_layout(text)).train()
        handle = model.get_submodule(name).register_forward_hook(lambda *_: None, with_kwargs=True)
        with pytest.raises(UnsupportedError, match=f"forward hook of {name} .*{match}"):
            model(**make_batch(0))
        handle.remove()
        # A mark says that the part will do.
        model.get_submodule(name).register_forward_hook(shard_safe(lambda *_: None), with_kwargs=True)
        model(**make_batch(0)).loss.backward()

    run_ranks(on_rank, 2)


def scaled_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()
        layer.mlp.down_proj.forward = shard_safe(
            lambda x, linear=layer.mlp.down_proj: type(linear).forward(linear, x * 0.5)
        )


def copied(model):
    duplicate = copy.deepcopy(model)
    duplicate.model.layers[0].mlp.register_forward_hook(lambda module, args, output: change(output))
    return duplicate


@pytest.mark.parametrize("prepare", [scaled_activation, copied])
@pytest.mark.parametrize("text", LAYOUTS)
def test_losses(path, prepare, text):
    def loss(config=None):
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        plain = model(**make_batch(0)).loss.item()
        model = prepare(model) or model
        return plain, model(**make_batch(0)).loss.item(), model.eval()(**make_batch(0)).loss.item()

    expected = loss()
    assert expected[1] != pytest.approx(expected[0], rel=1e-4)
    for found in run_ranks(lambda: loss(parse_layout(text)), 2):
        assert found == pytest.approx(expected, rel=1e-5)
