"""Tests that the cures which errors of tensor parallelism name let the loop continue as in a single process."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig, BloomConfig, LlamaForCausalLM

from hf_megatron import ConfigError, PlanError, UnsupportedError, register_model, shard_safe
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.registry import REGISTRY, load_families
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.cure_patterns import CurePatterns, expect_error, is_parallel
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import make_batch, parse_layout
from tests.integration.integrations.torch.test_dtensor_ops import read_scalar

cure_pattern = CurePatterns()


def train_on(loop, loss):
    loss.backward()
    loop.losses.append(read_scalar(loss.detach()))
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@cure_pattern("tp2", "tp2+sp")
def edit_head_after_backward(loop):
    weight = loop.model.lm_head.weight
    if is_parallel(loop):
        loss = loop.loss(0)
        with torch.no_grad():
            weight.mul_(2)
        with expect_error("Edit weights after backward().", RuntimeError):
            loss.backward()
        with torch.no_grad():
            weight.div_(2)
        loop.model.zero_grad()
    loop.backward(0)
    with torch.no_grad():
        weight.mul_(2)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@cure_pattern("tp2", "tp2+sp")
def backpropagate_twice(loop):
    if is_parallel(loop):
        loss = loop.loss(0)
        loss.backward()
        with expect_error("Use backward(retain_graph=True) first.", RuntimeError):
            loss.backward()
        loop.model.zero_grad()
    loss = loop.loss(0)
    loss.backward(retain_graph=True)
    train_on(loop, loss * 2)


@cure_pattern("tp2", "tp2+sp")
def reset_embedding_options(loop):
    embedding = loop.model.get_input_embeddings()
    if is_parallel(loop):
        for name, value in (("max_norm", 0.5), ("scale_grad_by_freq", True)):
            setattr(embedding, name, value)
            with expect_error("Set max_norm=None and scale_grad_by_freq=False."):
                loop.step(0)
            embedding.max_norm, embedding.scale_grad_by_freq = None, False
    loop.step(0)


@cure_pattern("tp2")
def call_complete_block(loop):
    mlp, states = loop.model.model.layers[0].mlp, torch.linspace(-1, 1, 2 * 6 * 32).reshape(2, 6, 32)
    if is_parallel(loop):
        cure = "Call the model, or a complete block with sequence_parallel=False, or load the model with tp_size=1."
        with expect_error(cure):
            mlp.up_proj(states)
    train_on(loop, loop.loss(0) + mlp(states).pow(2).mean())


@cure_pattern("tp2+sp")
def read_outputs_of_model(loop):
    """Reads the output of a projection in a call of the model."""
    projection, outputs = loop.model.model.layers[0].mlp.up_proj, []
    if is_parallel(loop):
        with expect_error("Call the model, or a complete block with sequence_parallel=False, or load the model"):
            projection(torch.zeros(2, 6, 32))
    handle = projection.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = loop.loss(0)
    handle.remove()
    train_on(loop, loss + outputs[0].pow(2).mean())


@cure_pattern("tp2+sp")
def read_weight_before_forward(loop):
    norm = loop.model.model.layers[0].input_layernorm
    if is_parallel(loop):
        handle = norm.register_forward_hook(lambda module, args, output: output * module.weight.pow(2).mean())
        with expect_error("Read it before the forward, or use tp_size=1."):
            loop.step(0)
        handle.remove()
    scale = norm.weight.pow(2).mean()
    scale = scale.full_tensor() if hasattr(scale, "full_tensor") else scale
    handle = norm.register_forward_hook(lambda module, args, output: output * scale)
    loop.step(0)
    handle.remove()


@cure_pattern("tp2+sp")
def differentiate_by_module_output(loop):
    layers, kept = loop.model.model.layers, []
    if is_parallel(loop):
        handle = layers[1].register_forward_hook(lambda module, args, output: kept.append(args[0]))
        loss = loop.loss(0)
        cure = "Use the output of the module that computes the input, or load the model with tp_size=1."
        with expect_error(cure):
            torch.autograd.grad(loss, kept)
        handle.remove()
        kept.clear()
    handle = layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    loss = loop.loss(0)
    handle.remove()
    [gradient] = torch.autograd.grad(loss, kept, retain_graph=True)
    loop.see("gradient", gradient)
    train_on(loop, loss)


@cure_pattern("tp2", "tp2+sp")
def hook_single_modules(loop):
    def scale(module, args, output):
        return output * 1.1 if isinstance(module, type(loop.model.model.layers[0].mlp)) else None

    if is_parallel(loop):
        handle = register_module_forward_hook(scale)
        cure = (
            "Register it on single modules, mark it with hf_megatron.shard_safe if shards are enough, or load the model"
        )
        with expect_error(cure):
            loop.step(0)
        handle.remove()
    handles = [layer.mlp.register_forward_hook(scale) for layer in loop.model.model.layers]
    loop.step(0)
    for handle in handles:
        handle.remove()


@cure_pattern("tp2", "tp2+sp")
def mark_global_hook(loop):
    def scale(module, args, output):
        return output * 1.1 if type(module).__name__ == "LlamaMLP" else None

    if is_parallel(loop):
        handle = register_module_forward_hook(scale)
        with expect_error(
            "mark it with hf_megatron.shard_safe if shards are enough, or load the model with tp_size=1."
        ):
            loop.step(0)
        handle.remove()
    handle = register_module_forward_hook(shard_safe(scale))
    loop.step(0)
    handle.remove()


@cure_pattern("tp2")
def call_complete_block_in_hook(loop):
    layer = loop.model.model.layers[0]
    if is_parallel(loop):
        handle = layer.self_attn.register_forward_hook(
            lambda module, args, output: (output[0] + layer.mlp.down_proj(layer.mlp.up_proj(output[0])), *output[1:])
        )
        with expect_error("Call a complete block with sequence_parallel=False, or load the model with tp_size=1."):
            loop.step(0)
        handle.remove()
        loop.model.zero_grad()
    handle = layer.self_attn.register_forward_hook(
        lambda module, args, output: (output[0] + layer.mlp(output[0]), *output[1:])
    )
    loop.step(0)
    handle.remove()


@cure_pattern("tp2", "tp2+sp")
def mark_replaced_function(loop):
    activations = [layer.mlp.act_fn for layer in loop.model.model.layers]

    def halved_gelu(x):
        return F.gelu(x) * 0.5

    if is_parallel(loop):
        activations[0].forward = halved_gelu
        cure = (
            "Mark it with hf_megatron.shard_safe if it is elementwise (attention: per head; layers: per token), or "
            "load the model with tp_size=1."
        )
        with expect_error(cure):
            loop.step(0)
    for activation in activations:
        activation.forward = shard_safe(halved_gelu)
    loop.step(0)
    for activation in activations:
        del activation.forward


@cure_pattern("tp2")
def assign_to_cloned_logits(loop):
    batch = make_batch(0)
    if is_parallel(loop):
        logits = loop.model(**batch).logits
        with expect_error("Use `logits.clone()` for other assignments, which gathers the logits."):
            logits[:, 0] = 0.0
    logits = loop.model(**batch).logits.clone()
    logits[:, 0] = 0.0
    targets = batch["input_ids"][:, 1:]
    train_on(loop, F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten()))


@pytest.fixture(scope="module")
def runs(tiny):
    return cure_pattern.make_runs(tiny)


@pytest.mark.filterwarnings("ignore:Full logits are gathered")
@pytest.mark.parametrize(("name", "text"), cure_pattern.parameters)
def test_cures_match_single_process(runs, name, text):
    runs[text].compare(text, name)


def measure_step(model, batch):
    loss = model.train()(**batch).loss
    loss.backward()
    return loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))


class ScoredLlama(LlamaForCausalLM):
    """Llama with a second head whose mean is part of the loss."""

    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids, labels):
        outputs = super().forward(input_ids=input_ids, labels=labels, output_hidden_states=True)
        outputs.loss = outputs.loss + self.value_head(outputs.hidden_states[-1]).pow(2).mean()
        return outputs


def test_module_added_before_loading(tiny, tmp_path):
    def on_rank():
        layout = ConfigUnderTest(**parse_layout("tp2").to_dict())
        model = LlamaForCausalLM.from_pretrained(tiny, megatron_config=layout).train()
        model.value_head = nn.Linear(32, 1)
        with expect_error("Add modules before loading.", PlanError):
            model(**make_batch(0))
        return measure_step(ScoredLlama.from_pretrained(tmp_path, megatron_config=layout), make_batch(0))

    torch.manual_seed(0)
    ScoredLlama.from_pretrained(tiny).save_pretrained(tmp_path)
    expected = measure_step(ScoredLlama.from_pretrained(tmp_path), make_batch(0))
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


@pytest.mark.parametrize(
    ("layout", "text", "setting"),
    [
        ("tp2+sp", "tp2+sp", "sequence_parallel=False"),
        ("tp2+sp", "tp2", "sequence_parallel=False"),
        ("cp2", "cp2", "cp_size=1"),
        ("cp2", "tp2", "cp_size=1"),
    ],
)
def test_layers_removed_before_loading(tiny, tmp_path, layout, text, setting):
    """A changed model is saved in a single process, or the sequence is not split."""

    def remove_layer(model):
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        return model

    def on_rank():
        model = remove_layer(AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(layout)))
        cure = f"Save the changed model in a single process and load it, or set {setting}."
        with expect_error(cure):
            model.train()(**make_batch(0))
        folder = tmp_path if text == layout else tiny
        model = AutoModelForCausalLM.from_pretrained(folder, megatron_config=parse_layout(text))
        return measure_step(model if text == layout else remove_layer(model), make_batch(0))

    model = remove_layer(AutoModelForCausalLM.from_pretrained(tiny))
    model.save_pretrained(tmp_path)
    expected = measure_step(model, make_batch(0))
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


def test_tp_size_that_divides_heads(tmp_path):
    def on_rank():
        with expect_error("= 3. Use a divisor.", ConfigError):
            AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=ConfigUnderTest(tp_size=2, dp_size=1))

    def on_three_ranks():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=ConfigUnderTest(tp_size=3))
        return measure_step(model, make_batch(0))

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=66, hidden_size=48, n_layer=2, n_head=3))
    model.save_pretrained(tmp_path)
    run_ranks(on_rank, 2)
    expected = measure_step(model, make_batch(0))
    assert run_ranks(on_three_ranks, 3) == [pytest.approx(expected, rel=1e-4)] * 3


def test_linear_class_listed_as_plain(monkeypatch):
    """Falcon's linears multiply in a forward of their own."""
    load_families()
    builder, tiny = REGISTRY["falcon"], make_tiny_model(CONFIG_MAPPING["falcon"]())
    monkeypatch.setitem(REGISTRY, "falcon", builder)
    layout = ConfigUnderTest(tp_size=2)

    def on_rank():
        cure = "Add the class to the family's `plain_linear_classes` if it computes the same."
        with expect_error(cure, PlanError):
            tiny.load(megatron_config=layout)

    register_model("falcon", lambda model: builder(model).updated(plain_linear_classes=()), replace=True)
    run_ranks(on_rank, 2)
    register_model("falcon", lambda model: builder(model).updated(plain_linear_classes=("FalconLinear",)), replace=True)
    comparison = check_tiny_model(tiny, layout)
    assert comparison.passed, comparison.report()


def test_int8_threshold_with_a_pipeline():
    pytest.importorskip("bitsandbytes")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny = make_tiny_model(CONFIG_MAPPING["llama"](), changes=sizes, batch_size=4)

    def load(layout, **options):
        quantization = BitsAndBytesConfig(load_in_8bit=True, **options)
        arguments = {} if layout is None else {"megatron_config": layout}
        return LlamaForCausalLM.from_pretrained(tiny.directory, quantization_config=quantization, **arguments)

    def on_rank():
        with expect_error("Set llm_int8_threshold=0.0, or use only data parallelism."):
            load(ConfigUnderTest(pp_size=2))
        return measure_step(load(ConfigUnderTest(pp_size=2), llm_int8_threshold=0.0), tiny.batches[0])

    expected = measure_step(load(None, llm_int8_threshold=0.0), tiny.batches[0])
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


def test_attention_maps_without_megatron_config(tiny):
    def read_maps(megatron_config=None):
        arguments = {} if megatron_config is None else {"megatron_config": megatron_config}
        model = AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager", **arguments)
        with torch.no_grad():
            return torch.stack(model(**make_batch(0), output_attentions=True).attentions)

    def on_rank():
        with pytest.raises(UnsupportedError, match="Load the model without megatron_config."):
            read_maps(parse_layout("tp2"))
        return read_maps()

    expected = read_maps()
    for maps in run_ranks(on_rank, 2):
        torch.testing.assert_close(maps, expected)
