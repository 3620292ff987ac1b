"""Tests of models whose modules are changed after loading: supported, or an error before the first step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_megatron import MegatronError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.testing.tiny_config import tiny_config
from tests.helpers.training import make_batch, parse_layout, shard_batch


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.1


def parametrize_norm(model):
    nn.utils.parametrize.register_parametrization(model.model.layers[0].input_layernorm, "weight", Scaled())


def remove_last_layer(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def remove_first_layer(model):
    model.model.layers = model.model.layers[1:]
    model.model.layers[0].self_attn.layer_idx = 0
    model.config.num_hidden_layers = 1


def untie_by_config(model):
    model.config.tie_word_embeddings = False
    model.tie_weights()


def differentiate_twice(model):
    loss = model(**make_batch(0)).loss
    (gradient,) = torch.autograd.grad(loss, [model.model.norm.weight], create_graph=True)
    (loss + gradient.pow(2).sum()).backward()


def call_with_other_parameters(model):
    rows = shard_batch(model, make_batch(0))
    others = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, others, args=(), kwargs=rows)


def differentiate_functionally(model):
    rows = shard_batch(model, make_batch(0))

    def loss(parameters):
        return torch.func.functional_call(model, parameters, args=(), kwargs=rows).loss

    torch.func.grad_and_value(loss)(dict(model.named_parameters()))


def replace_class(model):
    class Halved(type(model)):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.loss = outputs.loss / 2
            return outputs

    model.__class__ = Halved


def repeat_layer(model):
    first, *others = model.model.layers
    model.model.layers = nn.ModuleList([first, first, *others])
    model.config.num_hidden_layers += 1
    # Layers of one index share an entry of the cache, which raises before.
    model.config.use_cache = False


def reverse_layers(model):
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))


class Adapted(nn.Module):
    """A hand-written LoRA wrapper around a linear."""

    def __init__(self, base):
        super().__init__()
        torch.manual_seed(7)
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class AdaptedLinear(nn.Linear):
    """A LoRA linear that takes over the weight of the linear that it replaces."""

    def __init__(self, base):
        nn.Module.__init__(self)
        torch.manual_seed(7)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return super().forward(x) + self.up(self.down(x))


def add_adapters(model, kind=Adapted):
    for layer in model.model.layers:
        layer.self_attn.q_proj = kind(layer.self_attn.q_proj)


def add_adapters_owning_weights(model):
    add_adapters(model, AdaptedLinear)


def wrap_mlp(model):
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, nn.Identity())


def add_value_head(model):
    torch.manual_seed(3)
    model.value_head = nn.Linear(model.config.vocab_size, 1)


@pytest.mark.parametrize(
    ("change", "text", "match"),
    [
        (add_value_head, "tp2", "value_head.weight was added after the model was parallelized"),
        (add_value_head, "pp2", "value_head.weight was added to a pipelined model after loading"),
        (add_value_head, "dp2+zero3", "value_head.weight was added to a model with zero_stage=3 after loading"),
        (add_adapters, "tp2", "layers.0.self_attn.q_proj.base.weight was added after the model was parallelized"),
        (add_adapters, "pp2", "q_proj of a LlamaAttention: it lies on stage"),
        (add_adapters, "dp2+zero3", "layers.0.self_attn.q_proj.down.weight was added to a model with zero_stage=3"),
        (add_adapters_owning_weights, "tp2", "q_proj.down.weight was added after the model was parallelized"),
        (add_adapters_owning_weights, "dp2+zero3", "q_proj.weight was added to a model with zero_stage=3"),
        (wrap_mlp, "tp2", "layers.0.mlp.0.gate_proj.weight was added after the model was parallelized"),
        (repeat_layer, "pp2", "lists the layers .0, 0, 1"),
        (reverse_layers, "pp2", "lists the layers .1, 0"),
        (remove_last_layer, "pp2", "lists the layers .0. "),
        (replace_class, "pp2", "Halved.forward was replaced after loading"),
        (parametrize_norm, "tp2", "weight of a .* is no longer a parameter"),
        (remove_last_layer, "tp2+sp", "first or last layer of model.layers was removed"),
        (remove_first_layer, "tp2+sp", "first or last layer of model.layers was removed"),
        (untie_by_config, "pp2", "tie_word_embeddings was changed from True"),
        (differentiate_twice, "tp2", "cannot be differentiated twice"),
        (differentiate_twice, "tp2+sp", "cannot be differentiated twice"),
        (call_with_other_parameters, "dp2", "torch.func.functional_call"),
        (call_with_other_parameters, "pp2", "torch.func.functional_call"),
        (differentiate_functionally, "dp2+zero3", "torch.func.grad or another transform"),
    ],
)
def test_changed_models_are_rejected(tiny, change, text, match):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        with pytest.raises(MegatronError, match=match):
            change(model)
            model(**shard_batch(model, make_batch(0)))

    run_ranks(on_rank, 2)


def test_wrapped_module_of_zero_3_is_rejected(tiny):
    """`test_added_modules_train` wraps it under the stage that the error names."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2+zero3")).train()
        wrap_mlp(model)
        prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(MegatronError, match=r"mlp.0.gate_proj.weight is sharded over data-p.* Set zero_stage=2\."):
            model(**shard_batch(model, make_batch(0)))

    run_ranks(on_rank, 2)


def test_module_added_between_steps_is_rejected(tiny):
    """`prepare_optimizer` checks the parameters of each new optimizer."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("tp2")).train()

        def step():
            optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
            model(**make_batch(0)).loss.backward()
            optimizer.step()

        step()
        add_value_head(model)
        with pytest.raises(MegatronError, match="value_head.weight was added after the model was parallelized"):
            step()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("change", [remove_last_layer, remove_first_layer])
@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_removed_layers(tiny, change, text):
    def loss(config=None):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        change(model)
        with torch.no_grad():
            return model.eval()(**make_batch(0)).loss.item()

    for value in run_ranks(lambda: loss(parse_layout(text)), 2):
        assert value == pytest.approx(loss(), rel=1e-5)


@pytest.mark.parametrize(
    ("text", "match"),
    [("tp2", "was added after the model was parallelized"), ("pp2", "was added to a pipelined model")],
)
def test_added_modules_are_rejected_in_evaluation_mode(tiny, text, match):
    """`from_pretrained` returns a model in evaluation mode, and a loss on logits has no labels."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text))
        add_value_head(model)
        with pytest.raises(MegatronError, match=match):
            model(input_ids=make_batch(0)["input_ids"])
        with torch.no_grad():
            assert torch.isfinite(model(input_ids=make_batch(0)["input_ids"]).logits).all()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("text", ["dp2+zero0", "dp2", "cp2"])
def test_added_modules_need_equal_values_on_all_ranks(tiny, text):
    """Ranks that draw other values would train different models."""

    def train(config=None):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        rank = dist.get_rank() if config is not None else 0
        # The same seed on every rank is the cure.
        for seed in (rank, 3) if config is not None else (3,):
            torch.manual_seed(seed)
            model.value_head = nn.Linear(model.config.vocab_size, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if config is not None:
                prepare_optimizer(optimizer)
            if config is not None and seed == rank:
                with pytest.raises(MegatronError, match="value_head.bias was added .* Call torch.manual_seed with the"):
                    model(**shard_batch(model, make_batch(0)))
        logits = model(input_ids=make_batch(0)["input_ids"]).logits
        model.value_head(logits).pow(2).mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        return norm, model.value_head.weight.sum().item()

    expected = pytest.approx(train(), rel=1e-4)
    assert run_ranks(lambda: train(parse_layout(text)), 2) == [expected] * 2


@pytest.mark.parametrize("change", [add_value_head, add_adapters, add_adapters_owning_weights, wrap_mlp])
@pytest.mark.parametrize("text", ["dp2+zero0", "dp2", "dp2+zero2"])
def test_added_modules_train(tiny, change, text):
    def train(config=None):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if config is not None:
            prepare_optimizer(optimizer)
        norms = []
        for step in range(3):
            outputs = model(**shard_batch(model, make_batch(step)))
            loss = outputs.loss
            if change is add_value_head:
                # All ranks have equally many samples, so that the mean over ranks is the global mean.
                loss = loss + model.value_head(outputs.logits).pow(2).mean()
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    [expected] = run_ranks(train, 1)
    for values in run_ranks(lambda: train(parse_layout(text)), 2):
        assert values == pytest.approx(expected, rel=1e-4)


def replace_head(model):
    torch.manual_seed(3)
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)


def replace_embedding(model):
    torch.manual_seed(4)
    model.set_input_embeddings(nn.Embedding(model.config.vocab_size, model.config.hidden_size))


def replace_layers(model):
    torch.manual_seed(5)
    for index in range(model.config.num_hidden_layers):
        model.model.layers[index] = type(model)._from_config(model.config).model.layers[index]


def wrap_layers(model):
    class Wrapped(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return self.layer(*args, **kwargs)

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Wrapped(layer)


def measure_losses_and_norms(path, change, config):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for step in range(3):
        loss = model(**make_batch(step)).loss
        loss.backward()
        values += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("change", [replace_head, replace_embedding, replace_layers, wrap_layers])
def test_replaced_modules_stay_on_their_stages(tiny_uneven, change):
    [expected] = run_ranks(measure_losses_and_norms, 1, tiny_uneven, change, None)
    for values in run_ranks(measure_losses_and_norms, 2, tiny_uneven, change, parse_layout("pp2")):
        assert values == pytest.approx(expected, rel=1e-5)


def test_replaced_classification_head_with_more_classes():
    """Labels are checked against the number that the script has set, before any stage computes."""

    def train(config=None):
        torch.manual_seed(0)
        settings = tiny_config(LlamaConfig(pad_token_id=0))
        settings.num_labels = 2
        model = AutoModelForSequenceClassification.from_config(
            settings, **({} if config is None else {"megatron_config": config})
        ).train()
        torch.manual_seed(1)
        model.score = nn.Linear(settings.hidden_size, 3, bias=False)
        model.num_labels = model.config.num_labels = 3
        ids, optimizer = torch.arange(1, 33).view(4, 8), torch.optim.SGD(model.parameters(), lr=0.1)
        if config is not None:
            with pytest.raises(IndexError, match="label 3 is out of bounds for 3 classes"):
                model(input_ids=ids, labels=torch.tensor([0, 3, 1, 1]))
        losses = []
        for _ in range(3):
            loss = model(input_ids=ids, labels=torch.tensor([0, 2, 1, 1])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    [expected] = run_ranks(train, 1)
    assert run_ranks(lambda: train(parse_layout("pp2")), 2) == [pytest.approx(expected, rel=1e-5)] * 2


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def share_layer(model):
    model.model.layers[1] = model.model.layers[0]


@pytest.mark.parametrize("change", [swap_layers, share_layer])
def test_pipeline_modules_cannot_be_rearranged(tiny_uneven, change):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny_uneven, megatron_config=parse_layout("pp2"))
        with pytest.raises(MegatronError, match="cannot be replaced by another module of the pipelined model"):
            change(model)

    run_ranks(on_rank, 2)


def test_replaced_head_is_readable_on_its_stage_only(tiny_uneven):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny_uneven, megatron_config=parse_layout("pp2"))
        replace_head(model)
        if torch.distributed.get_rank() == 1:
            return model.lm_head.weight.shape[0]
        with pytest.raises(MegatronError, match="not on this rank"):
            model.lm_head.weight.tolist()
        with pytest.raises(MegatronError, match="not on this rank"):
            model.state_dict()["lm_head.weight"].sum().item()

    run_ranks(on_rank, 2)


def test_patched_layer_class_is_followed(tiny):
    """A `forward` patched on the layer class after loading is used, although subclasses keep the previous one."""

    def loss(config=None):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        stock = LlamaDecoderLayer.forward
        LlamaDecoderLayer.forward = lambda self, hidden_states, *args, **kwargs: stock(
            self, hidden_states * 0.9, *args, **kwargs
        )
        try:
            return model(**make_batch(0)).loss.item()
        finally:
            LlamaDecoderLayer.forward = stock

    expected = loss()
    for text in ("pp2", "dp2+zero3"):
        for value in run_ranks(lambda text=text: loss(parse_layout(text)), 2):
            assert value == pytest.approx(expected, rel=1e-5)
