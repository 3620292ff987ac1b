"""Models whose parts were changed after loading: followed, or an error before the first step."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import MegatronError
from hf_megatron.verify.ranks import run_ranks

from .habits import batch, layout, own_rows


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.1


def parametrize_a_norm(model):
    nn.utils.parametrize.register_parametrization(model.model.layers[0].input_layernorm, "weight", Scaled())


def remove_the_last_layer(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def remove_the_first_layer(model):
    model.model.layers = model.model.layers[1:]
    model.model.layers[0].self_attn.layer_idx = 0
    model.config.num_hidden_layers = 1


def untie_by_config(model):
    model.config.tie_word_embeddings = False
    model.tie_weights()


def call_with_other_parameters(model):
    rows = own_rows(model, batch(0))
    others = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, others, args=(), kwargs=rows)


def differentiate_by_function(model):
    rows = own_rows(model, batch(0))

    def loss(parameters):
        return torch.func.functional_call(model, parameters, args=(), kwargs=rows).loss

    torch.func.grad_and_value(loss)(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("change", "text", "match"),
    [
        (parametrize_a_norm, "tp2", "weight of a .* is no parameter any more"),
        (remove_the_last_layer, "tp2+sp", "first or last layer of model.layers was removed"),
        (remove_the_first_layer, "tp2+sp", "first or last layer of model.layers was removed"),
        (untie_by_config, "pp2", "tie_word_embeddings was changed from True"),
        (call_with_other_parameters, "dp2", "torch.func.functional_call"),
        (call_with_other_parameters, "pp2", "torch.func.functional_call"),
        (differentiate_by_function, "dp2+zero3", "torch.func.functional_call"),
    ],
)
def test_refused(tiny, change, text, match):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=layout(text)).train()
        with pytest.raises(MegatronError, match=match):
            change(model)
            model(**own_rows(model, batch(0)))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("change", [remove_the_last_layer, remove_the_first_layer])
@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_layers_are_removed(tiny, change, text):
    def loss(config=None):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        change(model)
        with torch.no_grad():
            return model.eval()(**batch(0)).loss.item()

    for found in run_ranks(lambda: loss(layout(text)), 2):
        assert found == pytest.approx(loss(), rel=1e-5)
