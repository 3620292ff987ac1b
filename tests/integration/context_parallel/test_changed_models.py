"""Tests of models that are changed after loading with context parallelism: equal, or an error before the first step."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_megatron import MegatronError, prepare_optimizer
from hf_megatron.context_parallel import axis as context_axis
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.placement import GradientRule
from hf_megatron.data_parallel import model_parameters
from hf_megatron.errors import RankError
from hf_megatron.models.fingerprint import silence
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel.stack_ends import StackEnds
from tests.helpers.dp_training import count_ranks
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import make_batch, parse_layout, save_tiny, shard_batch


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    save_tiny(folder, tie_word_embeddings=False)
    return folder


class LowRank(nn.Module):
    def __init__(self, weight):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(weight.shape[0], 2, generator=generator) * 0.1)
        self.down = nn.Parameter(torch.randn(2, weight.shape[1], generator=generator) * 0.1)

    def forward(self, weight):
        return weight + self.up @ self.down


def add_low_rank(module):
    parametrize.register_parametrization(module, "weight", LowRank(module.weight))


def add_biases(model):
    for layer in model.model.layers:
        layer.mlp.down_proj.bias = nn.Parameter(torch.zeros(model.config.hidden_size))


def normalize_weights(model):
    for layer in model.model.layers:
        weight_norm(layer.mlp.up_proj)


def normalize_spectra(model):
    torch.manual_seed(0)
    spectral_norm(model.model.layers[0].mlp.up_proj)


def adapt_layer(model):
    add_low_rank(model.model.layers[1].self_attn.q_proj)


def adapt_ends(model):
    add_low_rank(model.model.embed_tokens)
    add_low_rank(model.lm_head)


def add_bias_to_head(model):
    model.lm_head.bias = nn.Parameter(torch.zeros(model.config.vocab_size))


def replace_last_norm(model):
    norm = nn.LayerNorm(model.config.hidden_size)
    norm.weight = model.model.norm.weight
    model.model.norm = norm


def prune_weights(model):
    prune.l1_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    prune.l1_unstructured(model.model.norm, "weight", 0.5)


ADDITIONS = [
    add_biases,
    normalize_weights,
    normalize_spectra,
    adapt_layer,
    adapt_ends,
    add_bias_to_head,
    replace_last_norm,
    prune_weights,
]


def train_changed_models(path, config=None, changes=ADDITIONS, sabotage=None):
    """Returns for each change the losses and gradients of two steps, and the weights after them."""
    if sabotage is not None:
        sabotage()
    results = {}
    for change in changes:
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if config is not None:
            prepare_optimizer(optimizer)
        values = results[change.__name__] = {}
        for step in range(2):
            loss = model(**shard_batch(model, make_batch(step))).loss
            loss.backward()
            values[f"loss {step}"] = loss.detach()
            values |= {f"gradient {step} {name}": p.grad + 0 for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        values |= {f"weight {name}": p.detach() + 0 for name, p in model.named_parameters()}
    return results


def find_differences(results, expected):
    return sorted(
        f"{change}: {name}"
        for change, values in expected.items()
        for name, value in values.items()
        if not torch.allclose(results[change][name], value, rtol=1e-3, atol=2e-5)
    )


@pytest.mark.parametrize("text", ["cp2", "cp2+zero0", "cp2+zero2", "dp2+cp2"])
def test_added_parameters_train(untied, text):
    """Their gradients are averaged over the same ranks as those of planned parameters."""
    [expected] = run_ranks(lambda: train_changed_models(untied), 1)
    config = parse_layout(text)
    for results in run_ranks(lambda: train_changed_models(untied, config), count_ranks(config)):
        assert find_differences(results, expected) == []


def average_added_over_dp():
    model_parameters.GradientRule = lambda: GradientRule(average="dp")


def test_gradients_averaged_over_dp_only_are_detected(untied):
    changes = [add_biases]
    [expected] = run_ranks(lambda: train_changed_models(untied, changes=changes), 1)
    config = parse_layout("cp2")
    for results in run_ranks(lambda: train_changed_models(untied, config, changes, average_added_over_dp), 2):
        assert any("down_proj.bias" in name for name in find_differences(results, expected))


def lower_number_of_layers(model):
    model.config.num_hidden_layers = 1


def remove_last_layer(model):
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


def remove_first_layer(model):
    model.model.layers = model.model.layers[1:]
    model.model.layers[0].self_attn.layer_idx = 0
    model.config.num_hidden_layers = 1


def reverse_layers(model):
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))


def repeat_last_layer(model):
    model.model.layers.append(model.model.layers[-1])
    model.config.num_hidden_layers += 1


def append_copy(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[-1]))
    model.config.num_hidden_layers += 1


def insert_layer(model):
    model.model.layers.insert(1, LlamaDecoderLayer(model.config, 1))
    model.config.num_hidden_layers += 1


def call_for_loss(model):
    return model.train()(**make_batch(0)).loss


def call_base_model(model):
    return model.train().model(input_ids=make_batch(0)["input_ids"], use_cache=False).last_hidden_state


@torch.no_grad()
def evaluate(model):
    return model.eval()(input_ids=make_batch(0)["input_ids"]).logits


CHANGES = [
    lower_number_of_layers,
    remove_last_layer,
    remove_first_layer,
    reverse_layers,
    repeat_last_layer,
    append_copy,
    insert_layer,
]


@pytest.mark.parametrize("text", ["cp2", "tp2+sp"])
def test_changed_ends_of_the_stack_are_rejected(untied, text):
    """What splits and gathers the sequence has to run, whichever way the model is called."""

    def on_rank():
        problems = []
        # Sequence parallelism checks the weights of added layers, when gradients are recorded.
        for change in CHANGES if text == "cp2" else CHANGES[:-1]:
            model = AutoModelForCausalLM.from_pretrained(untied, megatron_config=parse_layout(text))
            change(model)
            for call in (call_for_loss, call_base_model, evaluate):
                try:
                    call(model)
                    problems.append(f"{change.__name__}, {call.__name__}: no error")
                except MegatronError as error:
                    # Added weights that are not sharded are rejected by name with tensor parallelism, and repeated
                    # layers that would share an entry of the cache before others.
                    known = "layer of model.layers was|was added after the model was para|have layer_idx = "
                    if not re.search(known, str(error)):
                        problems.append(f"{change.__name__}, {call.__name__}: {error}")
        return problems

    assert run_ranks(on_rank, 2) == [[]] * 2


def allow_any_layers():
    StackEnds._enter = lambda self, name, around, args, kwargs: None
    StackEnds._exit = lambda self, around, args, output: None


def test_unchecked_ends_are_detected(untied):
    def compute_states(config=None):
        if config is not None:
            allow_any_layers()
        model = AutoModelForCausalLM.from_pretrained(untied, megatron_config=config)
        lower_number_of_layers(model)
        return call_base_model(model).detach()

    expected = compute_states()
    for states in run_ranks(lambda: compute_states(parse_layout("cp2")), 2):
        assert states.shape != expected.shape or not torch.allclose(states, expected, rtol=1e-3)


def swap_middle_layers(model):
    layers = model.model.layers
    layers[1], layers[2] = layers[2], layers[1]


def remove_middle_layer(model):
    del model.model.layers[1]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers -= 1


def test_changed_layers_between_the_ends_are_equal(tmp_path):
    save_tiny(tmp_path, num_hidden_layers=4)
    changes = [swap_middle_layers, remove_middle_layer, copy.deepcopy]
    [expected] = run_ranks(lambda: train_changed_models(tmp_path, changes=changes), 1)
    for results in run_ranks(lambda: train_changed_models(tmp_path, parse_layout("cp2"), changes), 2):
        assert find_differences(results, expected) == []


def test_deep_copies_evaluate(untied):
    def compute_logits(config=None):
        model = AutoModelForCausalLM.from_pretrained(untied, megatron_config=config)
        return evaluate(copy.deepcopy(model)) + evaluate(model)

    expected = compute_logits()
    for logits in run_ranks(lambda: compute_logits(parse_layout("cp2")), 2):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def train_with_layerdrop(tiny_model, sabotage=None, **options):
    """Returns loss and gradients by name (`None` for skipped layers) for six seeds."""
    if sabotage is not None:
        sabotage()
    config = tiny_model.model_on_meta().config
    config.layerdrop = 0.5
    model = tiny_model.load(config=config, **options).train()
    silence(model)
    for module in model.modules():
        if "layerdrop" in vars(module):
            module.layerdrop = 0.5
    results = []
    for seed in range(6):
        torch.manual_seed(seed)
        loss = model(**tiny_model.batches[0]).loss
        loss.backward()
        gradients = {n: None if p.grad is None else p.grad + 0 for n, p in model.named_parameters()}
        results.append((loss.detach(), gradients))
        model.zero_grad(set_to_none=True)
    return results


def require_same_steps(results, expected):
    for (loss, gradients), (expected_loss, others) in zip(results, expected, strict=True):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-5)
        assert [name for name in others if gradients[name] is None] == [n for n in others if others[n] is None]
        kept = [name for name in others if others[name] is not None]
        torch.testing.assert_close(
            [gradients[name] for name in kept], [others[name] for name in kept], rtol=1e-3, atol=1e-5
        )


def ignore_layerdrop():
    context_axis.leaves_layers_out = lambda config: False


def test_layerdrop():
    """The same layers are skipped as in a single process, also the first and the last one."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["opt"](), min_layers=3)
    layout = ConfigUnderTest(cp_size=2)
    [expected] = run_ranks(lambda: train_with_layerdrop(tiny_model), 1)
    skipped = {name for _, gradients in expected for name, value in gradients.items() if value is None}
    assert any("layers.0." in name for name in skipped) and any("layers.2." in name for name in skipped)
    for results in run_ranks(lambda: train_with_layerdrop(tiny_model, megatron_config=layout), 2):
        require_same_steps(results, expected)
    with pytest.raises(RankError):
        run_ranks(lambda: train_with_layerdrop(tiny_model, ignore_layerdrop, megatron_config=layout), 2)
