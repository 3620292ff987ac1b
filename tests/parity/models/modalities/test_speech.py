"""Parity tests of encoder-decoder speech models: clips stay with their samples, convolutions on the first stage."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models.layers import LayerSequence
from hf_megatron.models.registry import spec_for
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel import microbatches, off_stage_images, stage_payload
from hf_megatron.tensor_parallel import attention_heads, install_regions
from hf_megatron.testing import measure
from hf_megatron.testing.parity import check_tiny_model, measured
from tests.helpers.shared_tiny_models import make_tiny_model


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="speech", microbatches=2)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp_size": 2, "sequence_parallel": True},
        {"pp_size": 2},
        {"pp_size": 2, "pipeline_partition": (1, 5)},
        {"pp_size": 2, "pipeline_partition": (5, 1)},
        {"pp_size": 2, "dp_size": 2},
        {"pp_size": 2, "tp_size": 2, "pipeline_schedule": "interleaved_1f1b"},
    ],
    ids=lambda layout: "+".join(f"{name}{value}" for name, value in layout.items()),
)
def test_whisper_matches_single_process(layout):
    comparison = check_tiny_model(get_tiny_model("whisper"), ConfigUnderTest(**layout))
    assert comparison.passed, comparison.report()


def test_unequal_audio_lengths_and_unshifted_labels():
    """Moonshine takes a mask over audio samples and passes its labels to the loss as shifted labels."""
    batch = get_tiny_model("moonshine").batches[0]
    assert not bool(batch["attention_mask"].all())
    comparison = check_tiny_model(get_tiny_model("moonshine"), ConfigUnderTest(pp_size=2))
    assert comparison.passed, comparison.report()


def use_global_head_count():
    attention_heads.LocalConfig.__getattr__ = lambda self, name: getattr(vars(self)["_config"], name)


def test_config_heads_are_local():
    """Moonshine's attention reads its head count from the config, which all layers share."""
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    comparison = check_tiny_model(get_tiny_model("moonshine"), layout)
    assert comparison.passed, comparison.report()
    with pytest.raises(RankError, match="is invalid for input of size"):
        check_tiny_model(get_tiny_model("moonshine"), layout, sabotage=use_global_head_count)


def test_zero_dim_parameters_are_read_in_full():
    """Moonshine Streaming compresses audio samples with a zero-dim parameter."""
    comparison = check_tiny_model(get_tiny_model("moonshine_streaming"), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


def test_encoder_output_projection():
    """Cohere's decoder projects the encoder output with a module that is defined after its layers."""
    model = get_tiny_model("cohere_asr").model_on_meta()
    layers = len(model.get_encoder().layers) + len(model.get_decoder().layers)
    for partition in ((1, layers - 1), (layers - 1, 1)):
        comparison = check_tiny_model(
            get_tiny_model("cohere_asr"), ConfigUnderTest(pp_size=2, pipeline_partition=partition)
        )
        assert comparison.passed, comparison.report()


def keep_batch_norms_training():
    measure.batch_norms = lambda model: []


def test_batch_norms_are_frozen_under_pipelines():
    """Canary's batch norms use batch statistics in a single process and with tp; pipelines require frozen norms."""
    comparison = check_tiny_model(get_tiny_model("canary"), ConfigUnderTest(pp_size=2))
    assert comparison.passed, comparison.report()
    assert abs(get_tiny_model("canary").frozen_norms.loss - get_tiny_model("canary").reference.loss) > 1e-3
    with pytest.raises(RankError, match="computes batch statistics"):
        check_tiny_model(get_tiny_model("canary"), ConfigUnderTest(pp_size=2), sabotage=keep_batch_norms_training)


def test_shared_relative_position_table():
    """Gradients of SpeechT5's relative position table are partial per rank's heads and must be summed."""
    comparison = check_tiny_model(get_tiny_model("speecht5"), ConfigUnderTest(tp_size=2))
    assert comparison.passed, comparison.report()


def iter_end_partitions(model_type):
    """Yields a layout with a single layer on the first stage, then one with a single layer on the last stage."""
    model = get_tiny_model(model_type).model_on_meta()
    layers = LayerSequence.of(model, spec_for(model), "pp_size").names
    for partition in ((1, len(layers) - 1), (len(layers) - 1, 1)):
        yield ConfigUnderTest(pp_size=2, pipeline_partition=partition)


def ignore_audio_masks():
    original = off_stage_images.OffStageShapes.forward

    def forward(self, *args, **kwargs):
        outputs = original(self, *args, **kwargs)
        return (outputs[0], torch.ones_like(outputs[1])) if outputs[1] is not None else outputs

    off_stage_images.OffStageShapes.forward = forward


def detach_position_bias():
    original = stage_payload.Carried.given

    def given(self, layer, name, args, kwargs):
        value = original(self, layer, name, args, kwargs)
        return value.detach() if name == "position_bias" and value is not None else value

    stage_payload.Carried.given = given


def test_audio_masks_and_position_bias_cross_stages():
    """SpeechT5 computes audio masks and relative positions before its first encoder layer."""
    speecht5 = make_tiny_model(CONFIG_MAPPING["speecht5"](), task="speech")
    # Without the roll, the sample without labels is the one with the shorter clip.
    speecht5.batches = [batch | {"labels": batch["labels"].roll(1, 0)} for batch in speecht5.batches]
    measured(speecht5)
    layout = ConfigUnderTest(pp_size=2, pipeline_partition=(1, 7))
    comparison = check_tiny_model(speecht5, layout)
    assert comparison.passed, comparison.report()
    assert not check_tiny_model(speecht5, layout, sabotage=ignore_audio_masks).passed
    assert not check_tiny_model(speecht5, layout, sabotage=detach_position_bias).passed


def test_summed_text_and_codebook_embeddings():
    """Kyutai's embedding sums text and codebook tokens; its codec is not used in training."""
    comparison = check_tiny_model(get_tiny_model("kyutai_speech_to_text"), ConfigUnderTest(pp_size=2))
    assert comparison.passed, comparison.report()


def run_adapter_without_gradients():
    off_stage_images.StagedChange.__call__ = torch.no_grad()(torch.nn.Module.__call__)


def test_adapter_changes_encoder_length():
    for layout in iter_end_partitions("seamless_m4t"):
        comparison = check_tiny_model(get_tiny_model("seamless_m4t"), layout)
        assert comparison.passed, comparison.report()
    assert not check_tiny_model(
        get_tiny_model("seamless_m4t"), ConfigUnderTest(pp_size=2), sabotage=run_adapter_without_gradients
    ).passed


def ignore_layerdrop():
    install_regions.leaves_layers_out = lambda config: False


def measure_with_layerdrop(layout, sabotage=None):
    """Returns loss, number of gradients and gradient norm of one batch with LayerDrop, for six seeds."""
    if sabotage is not None:
        sabotage()
    config = get_tiny_model("seamless_m4t").model_on_meta().config
    config.update({"speech_encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5})
    model = get_tiny_model("seamless_m4t").load(
        config=config, **({} if layout is None else {"megatron_config": layout})
    )
    results = []
    for seed in range(6):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model.train()(**get_tiny_model("seamless_m4t").batches[0]).loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        unsharded = [gradient.full_tensor() if layout is not None else gradient for gradient in gradients]
        results.append(
            (loss.item(), len(unsharded), torch.stack([gradient.norm() for gradient in unsharded]).norm().item())
        )
    return results


def test_layerdrop_with_sequence_parallelism():
    layout = ConfigUnderTest(tp_size=2, sequence_parallel=True)
    [expected] = run_ranks(functools.partial(measure_with_layerdrop, None), 1)
    assert len({count for _, count, _ in expected}) > 2
    for results in run_ranks(functools.partial(measure_with_layerdrop, layout), 2):
        for result, theirs in zip(results, expected, strict=True):
            assert result == pytest.approx(theirs, rel=1e-5)
    with pytest.raises(RankError):
        run_ranks(functools.partial(measure_with_layerdrop, layout, ignore_layerdrop), 2)


def test_whisper_generation_matches_single_process():
    features = get_tiny_model("whisper").batches[0]["input_features"]

    def generate(**layout):
        model = get_tiny_model("whisper").load(**layout).eval()
        config = model.generation_config
        config.update(decoder_start_token_id=1, pad_token_id=0, eos_token_id=None, forced_decoder_ids=None)
        config.update(suppress_tokens=None, begin_suppress_tokens=None)
        return [model.generate(features, max_new_tokens=6, do_sample=False, **way) for way in ({}, {"num_beams": 3})]

    [expected] = run_ranks(generate, 1)
    for tokens in run_ranks(generate, 2, megatron_config=ConfigUnderTest(pp_size=2)):
        assert all(map(torch.equal, tokens, expected))


def swap_audio_between_samples():
    original = microbatches._rows

    def slice_flipped_audio(name, tensor, count, part):
        return original(name, tensor.flip(0) if name == "input_features" else tensor, count, part)

    microbatches._rows = slice_flipped_audio


def test_seeded_fault_is_detected():
    assert not check_tiny_model(
        get_tiny_model("whisper"), ConfigUnderTest(pp_size=2), sabotage=swap_audio_between_samples
    ).passed
