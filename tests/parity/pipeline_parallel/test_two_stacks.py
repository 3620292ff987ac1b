"""Parity tests of encoder-decoder models in pipelines: training and generation for every partition of both stacks."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING, EncoderDecoderConfig
from transformers.modeling_outputs import BaseModelOutput

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.errors import RankError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel.boundary import ENCODED, HIDDEN_STATES, StageBoundary
from hf_megatron.pipeline_parallel.stage_payload import StagePayload
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

# Relative position biases that cross stages; learned positions; final norms defined before the layers.
TYPES = ("t5", "bart", "t5gemma")


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", microbatches=2)


def count_layers(model_type):
    return len([name for name, _ in get_tiny_model(model_type).model_on_meta().named_modules() if is_layer(name)])


def is_layer(name):
    owner, _, number = name.rpartition(".")
    return number.isdigit() and owner.rpartition(".")[2] in ("block", "layers")


def split_evenly(layers, stages):
    return tuple(layers // stages + (index < layers % stages) for index in range(stages))


@pytest.mark.parametrize("model_type", TYPES)
def test_every_partition_matches_single_process(model_type):
    layers = count_layers(model_type)
    for first in range(1, layers):
        layout = ConfigUnderTest(pp_size=2, pipeline_partition=(first, layers - first))
        comparison = check_tiny_model(get_tiny_model(model_type), layout)
        assert comparison.passed, (first, comparison.report())


def test_inputs_that_the_model_fills_in_place():
    """FSMT makes decoder inputs of its source tokens, and fills ignored entries in place."""
    config = CONFIG_MAPPING["fsmt"]()

    def run(**layout):
        model = make_tiny_model(config, task="seq2seq", microbatches=2).load(**layout).train()
        ids = torch.arange(48).view(4, 12) % 60 + 3
        loss = model(input_ids=ids, labels=ids.clone()).loss
        loss.backward()
        gradients = (parameter.grad for _, parameter in local_named_parameters(model) if parameter.grad is not None)
        return loss.item(), sum(gradient.square().sum().item() for gradient in gradients)

    [(expected_loss, expected_norm)] = run_ranks(run, 1)
    results = run_ranks(run, 2, megatron_config=ConfigUnderTest(pp_size=2))
    assert [loss for loss, _ in results] == [pytest.approx(expected_loss, rel=1e-5)] * 2
    assert sum(norm for _, norm in results) == pytest.approx(expected_norm, rel=1e-4)


@pytest.mark.parametrize("model_type", ["pegasus", "marian"])
def test_frozen_positions_are_trainable_on_every_stage(model_type):
    """The stock loader replaces the parameters that the class froze."""

    def run(**layout):
        model = make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", microbatches=2).load(**layout)
        return {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    [expected] = run_ranks(run, 1)
    assert run_ranks(run, 2, megatron_config=ConfigUnderTest(pp_size=2)) == [expected] * 2


def test_expert_dict_with_sequence_parallelism():
    """Each expert is called with its selected tokens, which are not sharded over the sequence."""
    comparison = check_tiny_model(
        get_tiny_model("switch_transformers"), ConfigUnderTest(tp_size=2, sequence_parallel=True)
    )
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}])
@pytest.mark.parametrize("types", ["bert-roberta", "electra-bert"])
def test_encoder_and_decoder_use_plans_from_their_types(types, layout):
    comparison = check_tiny_model(get_composite_tiny_model(types), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@functools.lru_cache(maxsize=1)
def get_composite_tiny_model(types):
    encoder, decoder = (CONFIG_MAPPING[name]() for name in types.split("-"))
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, decoder_start_token_id=1)
    config.pad_token_id = 0
    return make_tiny_model(config, task="seq2seq", microbatches=2)


@pytest.mark.parametrize("model_type", ["fsmt", "pegasus_x"])
def test_layers_pass_extra_values_in_both_stacks(model_type):
    """FSMT's layers return two and three values; Pegasus-X has global tokens, which middle stages must forward."""
    layers = count_layers(model_type)
    for partition in ((1, 1, layers - 2), (layers // 2, 1, layers - layers // 2 - 1)):
        layout = ConfigUnderTest(pp_size=3, pipeline_partition=partition, num_microbatches=3)
        comparison = check_tiny_model(get_tiny_model(model_type), layout)
        assert comparison.passed, (partition, comparison.report())


def test_dropped_global_tokens_are_detected(monkeypatch):
    def take_values(self, output, read):
        hidden_states = original(self, output, read)
        self.values = {place: torch.zeros_like(value) for place, value in self.values.items()}
        return hidden_states

    original = StagePayload.take_values
    monkeypatch.setattr(StagePayload, "take_values", take_values)
    layout = ConfigUnderTest(pp_size=2, pipeline_partition=(1, count_layers("pegasus_x") - 1))
    assert not check_tiny_model(get_tiny_model("pegasus_x"), layout).passed


@pytest.mark.parametrize("model_type", TYPES)
def test_middle_stages_forward_the_payload(model_type):
    """Middle stages inside the encoder, across the encoder-decoder boundary, and inside the decoder."""
    layers = count_layers(model_type)
    half = layers // 2
    for partition in ((1, 1, layers - 2), (1, half - 1, half), (2, half - 1, half - 1), (half, 1, half - 1)):
        layout = ConfigUnderTest(pp_size=3, pipeline_partition=partition, num_microbatches=3)
        comparison = check_tiny_model(get_tiny_model(model_type), layout)
        assert comparison.passed, (partition, comparison.report())


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2, "pipeline_schedule": "zbv"},
        {"pp_size": 2, "pipeline_schedule": "interleaved_1f1b", "recompute": "full"},
        {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2, "tp_size": 2, "sequence_parallel": True, "pipeline_schedule": "interleaved_1f1b"},
        {"pp_size": 2, "dp_size": 2, "zero_stage": 2},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
@pytest.mark.parametrize("model_type", TYPES)
def test_layouts_match_single_process(model_type, layout):
    if model_type == "t5" and layout.get("pipeline_schedule") == "zbv":
        with pytest.raises(RankError, match="relative_attention_bias.weight of the decoder's first layer"):
            check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
        return
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    "layout",
    [
        {"pp_size": 2},
        {"pp_size": 3},
        {"pp_size": 2, "tp_size": 2},
        {"pp_size": 2, "pipeline_schedule": "interleaved_1f1b"},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_matches_single_process(model_type, layout):
    require_same_tokens(model_type, layout)


def test_generation_with_experts_in_both_stacks():
    """The decoder copies the encoder's router logits, which only training reads."""
    require_same_tokens("switch_transformers", {"pp_size": 2})


def require_same_tokens(model_type, layout):
    batch = get_tiny_model(model_type).batches[0]
    prompt = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    fixed = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}

    def generate(**layout):
        model = get_tiny_model(model_type).load(**layout).eval()
        ways = ({}, {"num_beams": 3}, {"use_cache": False})
        return [model.generate(**prompt, pad_token_id=0, **fixed, **way) for way in ways]

    [expected] = run_ranks(generate, 1)
    config = ConfigUnderTest(**layout)
    for tokens in run_ranks(generate, config.ranks_per_replica, megatron_config=config):
        assert all(map(torch.equal, tokens, expected))


@pytest.mark.parametrize("model_type", ["bart", "pegasus_x"])
def test_generation_gathers_encoder_tokens(model_type):
    """Pegasus-X's encoder has no sequence-parallel stack: its layers call their linears directly."""
    prompt = {
        "input_ids": make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", microbatches=2).batches[0][
            "input_ids"
        ]
    }
    fixed = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}

    def generate(**layout):
        model = make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", microbatches=2).load(**layout).eval()
        return [model.generate(**prompt, pad_token_id=0, **fixed, **way) for way in ({}, {"num_beams": 3})]

    [expected] = run_ranks(generate, 1)
    for sequence_parallel in (False, True):
        layout = ConfigUnderTest(tp_size=2, sequence_parallel=sequence_parallel)
        for tokens in run_ranks(generate, 2, megatron_config=layout):
            assert all(map(torch.equal, tokens, expected))


def test_standalone_encoder_and_precomputed_output():
    """Repeats what `generate()` does: with the encoder output as an argument, only the decoder layers run."""
    batch = get_tiny_model("bart").batches[0]

    def run(**layout):
        model = get_tiny_model("bart").load(**layout).eval()
        with torch.no_grad():
            encoded = model.get_encoder()(input_ids=batch["input_ids"]).last_hidden_state
            outputs = model(encoder_outputs=(encoded,), decoder_input_ids=batch["labels"].clamp(min=0))
        return encoded, outputs.logits

    [expected] = run_ranks(run, 1)
    for results in run_ranks(run, 2, megatron_config=ConfigUnderTest(pp_size=2, pipeline_partition=(2, 4))):
        for value, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)


def test_standalone_encoder_with_gradients_raises():
    bart = get_tiny_model("bart")

    def run():
        model = bart.load(megatron_config=ConfigUnderTest(pp_size=2))
        model.get_encoder()(input_ids=bart.batches[0]["input_ids"])

    with pytest.raises(RankError, match="called alone with gradients"):
        run_ranks(run, 2)


def test_zero3_with_tied_embeddings_raises():
    with pytest.raises(
        RankError, match="are tied to model.shared.weight, but FSDP2 would shard them as separate weights"
    ):
        check_tiny_model(get_tiny_model("bart"), ConfigUnderTest(pp_size=2, dp_size=2, zero_stage=3))


def drop_argument_gradient(name):
    """Returns a fault that drops the gradient of a layer argument that crosses stages."""

    def patch_from_message():
        original = StagePayload.from_message.__func__

        def from_message(cls, message):
            payload = original(cls, message)
            payload.arguments = {
                place: value.detach() if place[0] == name else value for place, value in payload.arguments.items()
            }
            return payload

        StagePayload.from_message = classmethod(from_message)

    return patch_from_message


def drop_position_bias_gradient():
    """Drops the gradient of the position bias that the first layer of a stack returns for the others."""
    original = StageBoundary.pass_on

    def pass_on(self, args, kwargs):
        outputs = original(self, args, kwargs)
        return (
            tuple(None if value is None else value.detach() for value in outputs) if type(outputs) is tuple else outputs
        )

    StageBoundary.pass_on = pass_on


@pytest.mark.parametrize(
    ("fault", "partition"),
    [
        (drop_argument_gradient(ENCODED), (5, 3)),
        (drop_argument_gradient(HIDDEN_STATES), (1, 7)),
        (drop_position_bias_gradient, (6, 2)),
    ],
    ids=["encoded", "first", "positions"],
)
def test_seeded_faults_are_detected(fault, partition):
    layout = ConfigUnderTest(pp_size=2, pipeline_partition=partition)
    comparison = check_tiny_model(get_tiny_model("t5"), layout)
    assert comparison.passed, comparison.report()
    assert not check_tiny_model(get_tiny_model("t5"), layout, sabotage=fault).passed


@pytest.mark.parametrize("kind", [tuple, BaseModelOutput])
def test_external_encoder_outputs_get_gradients(kind):
    """The gradient reaches the given encoder outputs on every rank."""
    batch = get_tiny_model("t5").batches[0]

    def run(**layout):
        model = get_tiny_model("t5").load(**layout).train()
        encoded = torch.randn(
            *batch["input_ids"].shape, model.config.d_model, generator=torch.Generator().manual_seed(0)
        )
        encoded.requires_grad_(True)
        encoder_outputs = (encoded,) if kind is tuple else kind(last_hidden_state=encoded)
        mask = batch["attention_mask"]
        loss = model(encoder_outputs=encoder_outputs, attention_mask=mask, labels=batch["labels"]).loss
        loss.backward()
        return loss.detach(), encoded.grad

    [expected] = run_ranks(run, 1)
    for results in run_ranks(run, 2, megatron_config=ConfigUnderTest(pp_size=2, pipeline_partition=(3, 5))):
        for value, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)


def test_varying_source_lengths_and_invalid_batches():
    """Inputs that are invalid on every stage raise on all ranks, and the next call runs."""
    ids = get_tiny_model("t5").batches[0]["input_ids"]

    def run(**layout):
        model = get_tiny_model("t5").load(**layout).eval()
        fixed = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "decoder_start_token_id": 1}
        tokens = []
        for length in (9, 5):
            tokens.append(model.generate(ids[:, :length], use_cache=False, pad_token_id=0, **fixed))
            for wrong in ({"input_ids": ids + 1000}, {"input_ids": ids, "inputs_embeds": torch.zeros(1)}):
                with pytest.raises((IndexError, ValueError)):
                    model(**wrong, labels=ids)
        with pytest.raises(IndexError):
            model.generate(ids + 1000, **fixed)
        return tokens

    [expected] = run_ranks(run, 1)
    for tokens in run_ranks(run, 2, megatron_config=ConfigUnderTest(pp_size=2)):
        assert all(map(torch.equal, tokens, expected))


def test_layerdrop_raises():
    bart = get_tiny_model("bart")

    def run():
        model = bart.load(megatron_config=ConfigUnderTest(pp_size=2)).train()
        model.model.encoder.layerdrop = 0.3
        model(**bart.batches[0])

    with pytest.raises(RankError, match=r"skips layers at random in training \(layerdrop > 0\)"):
        run_ranks(run, 2)


def test_decoder_shorter_than_encoder_generates():
    """transformers creates one cache entry per encoder layer."""
    unequal = make_tiny_model(
        CONFIG_MAPPING["t5"](), task="seq2seq", changes={"num_layers": 4, "num_decoder_layers": 2}
    )
    ids = unequal.batches[0]["input_ids"]

    def generate(**layout):
        model = unequal.load(**layout).eval()
        return model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, decoder_start_token_id=1)

    [expected] = run_ranks(generate, 1)
    for partition in ((2, 4), (5, 1)):
        config = ConfigUnderTest(pp_size=2, pipeline_partition=partition)
        assert check_tiny_model(unequal, config).passed
        for tokens in run_ranks(generate, 2, megatron_config=config):
            assert torch.equal(tokens, expected)
