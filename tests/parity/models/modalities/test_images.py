"""Parity tests of image-text models: samples with no, one and two images, all axes, every pipeline partition."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron import ConfigError, MegatronConfig
from hf_megatron.context_parallel.sequence_split import ContextStack
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.batch_norm import batch_norms
from hf_megatron.errors import RankError, UnsupportedError
from hf_megatron.models.modalities import sample_index
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import vocab_parallel_head
from hf_megatron.testing.parity import TinyModel, check_tiny_model, measured
from tests.helpers.shared_tiny_models import make_tiny_model

TYPES = ("qwen2_5_vl", "gemma3")


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="image", microbatches=2, min_layers=4, batch_size=4)


PIPELINES = [
    {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
    {"pp_size": 2, "num_microbatches": 4, "pipeline_schedule": "zbv", "recompute": "full"},
]


def format_layout(layout):
    return "+".join(f"{name}{value}" for name, value in layout.items())


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
    "layout",
    [{"tp_size": 2, "sequence_parallel": True}, {"dp_size": 2, "zero_stage": 3}, *PIPELINES],
    ids=format_layout,
)
def test_layouts_match_single_process(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", TYPES)
def test_every_partition_matches_single_process(model_type):
    layers = get_tiny_model(model_type).config.text_config.num_hidden_layers
    for first in range(1, layers):
        layout = ConfigUnderTest(pp_size=2, num_microbatches=2, pipeline_partition=(first, layers - first))
        comparison = check_tiny_model(get_tiny_model(model_type), layout)
        assert comparison.passed, (first, comparison.report())


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("gemma3", {"cp_size": 2, "dp_size": 2}),
        ("qwen2_5_vl", {"pp_size": 2, "cp_size": 2, "num_microbatches": 2, "recompute": "full"}),
        # Image features added between layers; a vision encoder that creates its own masks.
        ("qwen3_vl", {"tp_size": 2, "sequence_parallel": True, "cp_size": 2}),
        ("aria", {"pp_size": 2, "cp_size": 2, "num_microbatches": 2, "recompute": "full"}),
    ],
    ids=lambda value: value if isinstance(value, str) else format_layout(value),
)
def test_images_with_context_parallelism(model_type, layout):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


def test_dropped_deepstack_features_are_detected():
    def drop_deepstack_features():
        ContextStack.on_full_sequence = lambda self, function: lambda hidden, *args: hidden

    assert not check_tiny_model(
        get_tiny_model("qwen3_vl"), ConfigUnderTest(cp_size=2), sabotage=drop_deepstack_features
    ).passed


def generate_tokens(image_tiny_model, layout):
    model = image_tiny_model.load() if layout is None else image_tiny_model.load(megatron_config=layout)
    batch = {name: value for name, value in image_tiny_model.batches[0].items() if name != "labels"}
    tokens = model.eval().generate(**batch, max_new_tokens=4, do_sample=False)
    return tokens.tolist()


@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"dp_size": 2, "zero_stage": 3}], ids=format_layout)
@pytest.mark.parametrize("model_type", TYPES)
def test_generation_matches_single_process(model_type, layout):
    expected = generate_tokens(get_tiny_model(model_type), None)
    assert run_ranks(generate_tokens, 2, get_tiny_model(model_type), ConfigUnderTest(**layout)) == [expected] * 2


class FrozenEncoders(TinyModel):
    def load(self, **kwargs):
        model = super().load(**kwargs)
        for name, parameter in model.named_parameters():
            if "visual" in name:
                parameter.requires_grad = False
        return model


def freeze_encoders(base):
    return measured(FrozenEncoders(**vars(base)))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2, "dp_size": 2, "num_microbatches": 2},
        {"dp_size": 2, "zero_stage": 3},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
def test_frozen_vision_encoder_matches_single_process(layout):
    """Fine-tuning of the text backbone only, with image features added between layers."""
    qwen3_vl = make_tiny_model(CONFIG_MAPPING["qwen3_vl"](), task="image", microbatches=2, min_layers=4, batch_size=4)
    comparison = check_tiny_model(freeze_encoders(qwen3_vl), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("model_type", TYPES)
def test_images_from_wrong_sample_are_detected(model_type):
    """Seeded fault: images swapped between samples, with unchanged sizes and placeholders."""
    original = sample_index.rows_with_images

    def swap_image_inputs():
        def swap_samples(arguments, rows, config):
            image_inputs = original(arguments, rows, config)
            return image_inputs | ({"pixel_values": image_inputs["pixel_values"].flip(0)} if image_inputs else {})

        sample_index.rows_with_images = swap_samples

    layout = ConfigUnderTest(pp_size=2, num_microbatches=2)
    comparison = check_tiny_model(get_tiny_model(model_type), layout, sabotage=swap_image_inputs)
    assert not comparison.passed and comparison.worst.value > 10


def test_deepstack_layers_stay_on_the_first_stage():
    deep = make_tiny_model(CONFIG_MAPPING["qwen3_vl"](), task="image", microbatches=2, min_layers=4, batch_size=4)
    layers = deep.config.text_config.num_hidden_layers
    count = len(deep.config.vision_config.deepstack_visual_indexes)
    assert layers > count + 1
    for first in (count + 1, layers - 1):
        layout = {"pp_size": 2, "num_microbatches": 2, "pipeline_partition": (first, layers - first)}
        comparison = check_tiny_model(deep, ConfigUnderTest(**layout))
        assert comparison.passed, (first, comparison.report())

    def load():
        layout = ConfigUnderTest(pp_size=2, pipeline_partition=(count, layers - count))
        with pytest.raises(ConfigError, match=f"the first stage has {count + 1} layers or more"):
            deep.load(megatron_config=layout)

    run_ranks(load, 2)


def test_image_placeholder_mismatch_raises():
    gemma3 = get_tiny_model("gemma3")

    def call():
        model = gemma3.load(megatron_config=MegatronConfig(pp_size=2, num_microbatches=2))
        batch = dict(gemma3.batches[0])
        batch["pixel_values"] = torch.cat([batch["pixel_values"], batch["pixel_values"][:1]])
        model(**batch)

    with pytest.raises(RankError, match="image placeholders, but its"):
        run_ranks(call, 2)


def test_masked_tokens_and_per_head_norms():
    chameleon = make_tiny_model(CONFIG_MAPPING["chameleon"](), task="image", microbatches=2)
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    comparison = check_tiny_model(chameleon, layout)
    assert comparison.passed, comparison.report()

    def ignore_vocab_offset():
        """Seeded fault: every rank masks tokens as if its vocabulary shard started at 0."""
        original = vocab_parallel_head.filling
        vocab_parallel_head.filling = lambda tokens, value, vocab_start: original(tokens, value, 0)

    assert not check_tiny_model(chameleon, layout, sabotage=ignore_vocab_offset).passed


def test_batch_norm_on_microbatches_raises():
    emu3 = make_tiny_model(CONFIG_MAPPING["emu3"](), task="image")

    def call():
        model = emu3.load(megatron_config=ConfigUnderTest(pp_size=2, num_microbatches=2)).train()
        with pytest.raises(
            UnsupportedError, match=r"BatchNorm3d.*Call module.eval\(\) on every BatchNorm module after each"
        ):
            model(**emu3.batches[0])
        for name in batch_norms(model):
            model.get_submodule(name).eval()
        model(**emu3.batches[0])

    run_ranks(call, 2)
