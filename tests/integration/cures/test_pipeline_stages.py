"""Follows the cures that errors of splitting a model into stages name: afterwards it trains as a single process."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    LlamaForCausalLM,
    LlamaModel,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_megatron import UnsupportedError, register_model
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.infer import stated_or_inferred_spec
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.same_step import require_same_step
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import make_batch, save_tiny
from tests.integration.cures.test_pipeline_calls import SIZES, save_model
from tests.integration.cures.test_pipeline_training import load, load_single

BATCH = make_batch(0)
IDS = BATCH["input_ids"]


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("three_layers")
    save_tiny(path, num_hidden_layers=3)
    return path


@functools.cache
def get_tiny_model(model_type, **options):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2, **options)


def load_tiny(tiny_model, **layout):
    return tiny_model.load(megatron_config=ConfigUnderTest(**layout)).train()


def register_llama(**changes):
    """Registers a Llama spec with other fields."""
    register_model("llama", lambda model: stated_or_inferred_spec(model).updated(**changes), replace=True)


# Layer loops


def run_layers(self, input_ids, run_layer):
    """Runs a Llama's layers with a loop of one's own; `run_layer(index, layer, hidden_states, **arguments)`."""
    hidden_states = self.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1])[None]
    arguments = {"position_embeddings": self.rotary_emb(hidden_states, positions), "position_ids": positions}
    for index, layer in enumerate(self.layers):
        hidden_states = run_layer(index, layer, hidden_states, **arguments)
    return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class ShiftedModel(LlamaModel):
    """Adds a constant to the hidden states after the second layer."""

    def forward(self, input_ids=None, **kwargs):
        def run_layer(index, layer, hidden_states, **arguments):
            hidden_states = layer(hidden_states, **arguments)
            return hidden_states + 0.5 if index == 1 else hidden_states

        return run_layers(self, input_ids, run_layer)


class SummedModel(LlamaModel):
    """Passes the second output of each layer to the next one."""

    def forward(self, input_ids=None, **kwargs):
        mean = None

        def run_layer(index, layer, hidden_states, **arguments):
            nonlocal mean
            hidden_states, mean = layer(hidden_states, mean=mean, **arguments)
            return hidden_states

        return run_layers(self, input_ids, run_layer)


def make_summed_layer(wrap, unwrap):
    """Returns the forward of a layer that adds the mean of the previous layer's output, which `wrap` contains."""
    stock = LlamaDecoderLayer.forward

    def forward(self, hidden_states, mean=None, **kwargs):
        hidden_states = stock(self, hidden_states if mean is None else hidden_states + unwrap(mean), **kwargs)
        outputs = hidden_states, wrap(hidden_states.mean(-1, keepdim=True))
        return outputs

    return forward


def set_loop(monkeypatch, cls):
    monkeypatch.setattr(LlamaModel, "forward", cls.forward)


def test_loops_that_change_hidden_states(monkeypatch, three_layers):
    """The change is inside of a stage, or there is one stage."""
    set_loop(monkeypatch, ShiftedModel)

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"Choose another split with pipeline_partition, or use pp_size=1\."):
            load(three_layers, pipeline_partition=(2, 1))(**BATCH)
        single = load_single(three_layers)
        for model in (load(three_layers, pipeline_partition=(1, 2)), load(three_layers, pp_size=1)):
            require_same_step(model, single, BATCH)

    run_ranks(on_rank, 2)


def test_layers_with_several_outputs(monkeypatch, three_layers):
    """The number of outputs is in the family's spec."""
    monkeypatch.setattr(LlamaDecoderLayer, "forward", make_summed_layer(lambda mean: mean, lambda mean: mean))
    set_loop(monkeypatch, SummedModel)

    def on_rank():
        with pytest.raises(UnsupportedError, match="Register a spec with their number as `layer_num_outputs`, or load"):
            load(three_layers)(**BATCH)
        single = load_single(three_layers)
        require_same_step(load(three_layers, pp_size=1), single, BATCH)
        register_llama(layer_num_outputs=2)
        require_same_step(load(three_layers), single, BATCH)

    run_ranks(on_rank, 2)


def test_layer_outputs_that_are_no_tensors(monkeypatch, three_layers):
    """One stage: nothing is sent."""
    make_forward = make_summed_layer(lambda mean: {"mean": mean}, lambda mean: mean["mean"])
    monkeypatch.setattr(LlamaDecoderLayer, "forward", make_forward)
    set_loop(monkeypatch, SummedModel)

    def call():
        register_llama(layer_num_outputs=2)
        # The second rank loses the connection to the first one.
        with pytest.raises((UnsupportedError, RuntimeError)) as raised:
            load(three_layers)(**BATCH)
        return str(raised.value)

    def on_rank():
        require_same_step(load(three_layers, pp_size=1), load_single(three_layers), BATCH)

    assert "only tensors and tuples of tensors. Load the model with pp_size=1." in run_ranks(call, 2)[0]
    run_ranks(on_rank, 2)


class ScaledModel(LlamaForCausalLM):
    """A parameter next to the layers, which scales the embeddings."""

    def __init__(self, config):
        super().__init__(config)
        self.input_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        embeddings = self.model.embed_tokens(input_ids) * self.input_scale
        return super().forward(inputs_embeds=embeddings, **kwargs)


def test_parameters_next_to_layers(tmp_path):
    """They are listed as read before the layers, or there is one stage."""
    path = save_model(tmp_path, CONFIG_MAPPING["llama"](**SIZES), ScaledModel)

    def on_rank():
        with pytest.raises(UnsupportedError, match="pp_size=1, or list them in its family's `before_layers`"):
            load(path, ScaledModel)
        single = load_single(path, ScaledModel)
        require_same_step(load(path, ScaledModel, pp_size=1), single, BATCH)
        register_llama(before_layers=("input_scale",))
        require_same_step(load(path, ScaledModel), single, BATCH)

    run_ranks(on_rank, 2)


# Inputs and outputs


def test_images_only(tmp_path):
    """Models without tokens have one stage."""
    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    path = save_model(tmp_path, config, ViTForImageClassification)
    batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 1])}

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"supports models that take input_ids\. Load it with pp_size=1\."):
            load(path, ViTForImageClassification)
        model = load(path, ViTForImageClassification, pp_size=1)
        require_same_step(model, load_single(path, ViTForImageClassification), batch)

    run_ranks(on_rank, 2)


def test_audio_of_text_models(tiny):
    """The argument is left out, or the model has one stage."""
    batch = BATCH | {"audio_mask": torch.ones(4, 2)}

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        with pytest.raises(UnsupportedError, match=r"Leave it out, or load the model with pp_size=1\."):
            model(**batch)
        require_same_step(model, single, BATCH)
        require_same_step(load(tiny, pp_size=1), single, batch)

    run_ranks(on_rank, 2)


def test_states_of_other_stages():
    """One stage has the states of all layers."""
    # Stock states need as many channels in attention as in hidden states.
    tiny_model = make_tiny_model(
        CONFIG_MAPPING["rwkv"](), microbatches=2, changes={"hidden_size": 64, "attention_hidden_size": 64}
    )
    ids = tiny_model.batches[0]["input_ids"]

    def on_rank():
        outputs = load_tiny(tiny_model, pp_size=2)(input_ids=ids)
        with pytest.raises(UnsupportedError, match=r"states of its own layers\. Load the model with pp_size=1\."):
            print(outputs.state)
        models = load_tiny(tiny_model, pp_size=1).eval(), tiny_model.load().eval()
        with torch.no_grad():
            states = [model(input_ids=ids, use_cache=True).state for model in models]
        torch.testing.assert_close(*states)

    run_ranks(on_rank, 2)


# Schedules and ZeRO stages


def test_split_backwards_with_zero3(tiny):
    """A schedule that does not split the backward, or another ZeRO stage."""

    def on_rank():
        split = {"pipeline_schedule": "interleaved_zero_bubble", "virtual_stages": 1}
        with pytest.raises(UnsupportedError, match="Use '1f1b', 'interleaved_1f1b', or zero_stage 1 or 2"):
            load(tiny, dp_size=2, zero_stage=3, **split)
        single = load_single(tiny)
        for layout in (
            {"pipeline_schedule": "1f1b", "zero_stage": 3},
            {"pipeline_schedule": "interleaved_1f1b", "virtual_stages": 1, "zero_stage": 3},
            {"zero_stage": 1, **split},
            {"zero_stage": 2, **split},
        ):
            require_same_step(load(tiny, dp_size=2, **layout), single, BATCH)

    run_ranks(on_rank, 4)


def test_split_backwards_of_position_biases():
    """Schedules that do not split the backward."""
    tiny_model = get_tiny_model("t5", task="seq2seq")

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"would not reach it\. Use '1f1b' or 'interleaved_1f1b'\."):
            load_tiny(tiny_model, pp_size=2, pipeline_schedule="zbv")
        for layout in ({"pipeline_schedule": "1f1b"}, {"pipeline_schedule": "interleaved_1f1b", "virtual_stages": 1}):
            model = load_tiny(tiny_model, pp_size=2, **layout)
            require_same_step(model, tiny_model.load().train(), tiny_model.batches[0] | {"use_cache": False})

    run_ranks(on_rank, 2)


def test_tied_embeddings_with_zero3():
    """Encoder and decoder share an embedding: ZeRO stage 1 or 2."""
    tiny_model = get_tiny_model("bart", task="seq2seq")

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"tied to model.shared.weight.*Use zero_stage 1 or 2\."):
            load_tiny(tiny_model, pp_size=2, dp_size=2, zero_stage=3)
        for zero_stage in (1, 2):
            model = load_tiny(tiny_model, pp_size=2, dp_size=2, zero_stage=zero_stage)
            require_same_step(model, tiny_model.load().train(), tiny_model.batches[0])

    run_ranks(on_rank, 4)


# Weights that layers share


def test_layers_that_share_weights():
    """Two stages, and ZeRO stage 1 or 2."""
    tiny_model = get_tiny_model("zamba")

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"which at most two ranks can share\. Load it with pp_size=2\."):
            load_tiny(tiny_model, pp_size=4)
        with pytest.raises(UnsupportedError, match=r"as separate weights\. Use zero_stage 1 or 2\."):
            load_tiny(tiny_model, pp_size=2, dp_size=2, zero_stage=3)
        for zero_stage in (1, 2):
            model = load_tiny(tiny_model, pp_size=2, dp_size=2, zero_stage=zero_stage)
            require_same_step(model, tiny_model.load().train(), tiny_model.batches[0])

    run_ranks(on_rank, 4)


class TiedQueries(LlamaForCausalLM):
    """The layers share the weight of their queries only."""

    _tied_weights_keys = {
        **LlamaForCausalLM._tied_weights_keys,
        "model.layers.1.self_attn.q_proj.weight": "model.layers.0.self_attn.q_proj.weight",
    }


def test_modules_that_share_some_weights(tmp_path):
    """One stage."""
    config = CONFIG_MAPPING["llama"](**SIZES, tie_word_embeddings=True)
    path = save_model(tmp_path, config, TiedQueries)

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"self_attn.* in it is not\. Load it with pp_size=1\."):
            load(path, TiedQueries)
        require_same_step(load(path, TiedQueries, pp_size=1), load_single(path, TiedQueries), BATCH)

    run_ranks(on_rank, 2)


def add_adapter(model, *targets):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules=[*targets], init_lora_weights=False)).train()


def test_adapters_on_tied_weights():
    """Other modules get adapters, or the model has one stage."""
    tiny_model = get_tiny_model("zamba")
    batch = tiny_model.batches[0]

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"Leave its module out of target_modules, or use pp_size=1\."):
            add_adapter(load_tiny(tiny_model, pp_size=2), "o_proj")(**batch)
        model, single = load_tiny(tiny_model, pp_size=2), tiny_model.load()
        require_same_step(add_adapter(model, "out_proj"), add_adapter(single, "out_proj"), batch)

    run_ranks(on_rank, 2)


class NormedTable(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.norm = table, nn.LayerNorm(table.embedding_dim)

    def forward(self, tokens):
        return self.norm(self.table(tokens))


class NormedEmbedding(LlamaForCausalLM):
    """The embedding is inside a module that also normalizes it."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.table.weight"}

    def __init__(self, config):
        super(LlamaForCausalLM, self).__init__(config)
        self.vocab_size, self.model = config.vocab_size, LlamaModel(config)
        self.model.embed_tokens = NormedTable(self.model.embed_tokens)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens.table


def test_heads_tied_inside_a_module(tmp_path):
    """One stage."""
    path = save_model(tmp_path, CONFIG_MAPPING["llama"](**SIZES, tie_word_embeddings=True), NormedEmbedding)

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"only the first stage has\. Load it with pp_size=1\."):
            load(path, NormedEmbedding)
        require_same_step(load(path, NormedEmbedding, pp_size=1), load_single(path, NormedEmbedding), BATCH)

    run_ranks(on_rank, 2)


# Router logits


def nest_router_logits(model):
    """A router of one's own returns a tuple of logits."""
    for layer in model.model.layers:
        if "gate" in dict(layer.mlp.named_children()):
            layer.mlp.gate.register_forward_hook(lambda module, args, output: ((output[0], output[0]), *output[1:]))
    return model


def test_router_logits_that_are_no_tensors(tmp_path):
    """They are left out, or the model has one stage."""
    config = CONFIG_MAPPING["mixtral"](**SIZES, num_key_value_heads=2, num_local_experts=4)
    path = save_model(tmp_path, config, MixtralForCausalLM)

    def call():
        with pytest.raises((UnsupportedError, RuntimeError)) as raised, torch.no_grad():
            nest_router_logits(load(path))(IDS, output_router_logits=True)
        return str(raised.value)

    def on_rank():
        require_same_step(nest_router_logits(load(path)), nest_router_logits(load_single(path)), BATCH)

    assert "router logits that are not tensors. Leave it out, or use pp_size=1." in run_ranks(call, 2)[0]
    run_ranks(on_rank, 2)
