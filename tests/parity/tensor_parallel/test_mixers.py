"""Parity tests of state space mixers with heads sharded over tp, with one group for all heads or one per rank."""

import functools

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import UnsupportedError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import head_sharded_blocks
from hf_megatron.testing.adapters import adapted
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2, min_layers=2)


LAYOUTS = {
    # One group, with a norm over all heads.
    "bamba": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    # One group per rank; weights also sharded over dp.
    "mamba2": {"tp_size": 2, "dp_size": 2, "zero_stage": 3},
    # Fused projection of two equal blocks; time steps computed from all channels.
    "mamba": {"tp_size": 4, "sequence_parallel": True},
}


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_match_single_process(model_type):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(**LAYOUTS[model_type]))
    assert comparison.passed, comparison.report()


def swap_projection_chunks():
    """Swaps the chunks of fused projection weights."""
    original = torch.Tensor.chunk

    def chunk(self, parts, dim=0):
        chunks = original(self, parts, dim)
        return chunks[::-1] if self.dim() == 2 and dim == 0 else chunks

    torch.Tensor.chunk = chunk


def skip_gathered_gradient_sum():
    """Gathers in forward without summing the gradient in backward."""
    original = head_sharded_blocks.gather_from_ranks
    head_sharded_blocks.gather_from_ranks = lambda *args, sum_gradient=False: original(*args)


def use_local_norm():
    head_sharded_blocks._make_gathered_norm = lambda norm, group: (
        lambda *args: norm(*(arg.repeat(1, 1, 2) for arg in args)).chunk(2, -1)[0]
    )


def use_local_time_steps():
    head_sharded_blocks.make_reduced_linear = lambda weight, group: lambda features: features @ weight.T


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [
        ("bamba", swap_projection_chunks),
        ("bamba", skip_gathered_gradient_sum),
        ("bamba", use_local_norm),
        ("mamba", use_local_time_steps),
    ],
)
def test_seeded_faults_are_detected(model_type, fault):
    comparison = check_tiny_model(get_tiny_model(model_type), ConfigUnderTest(tp_size=2), sabotage=fault)
    assert not comparison.passed and comparison.worst.value > 10


def test_adapters_inside_mixers():
    bamba = adapted(get_tiny_model("bamba"), "lora")
    comparison = check_tiny_model(bamba, ConfigUnderTest(tp_size=2, sequence_parallel=True))
    assert comparison.passed, comparison.report()


def test_trainable_mixer_weight_with_adapters_raises(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    bamba = get_tiny_model("bamba")
    model = get_peft_model(bamba.load(), LoraConfig(target_modules=["in_proj"], r=2, init_lora_weights=False))
    model.save_pretrained(tmp_path)

    def measure(model):
        loss = model(**bamba.batches[0]).loss
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return loss.item(), float(torch.nn.utils.clip_grad_norm_(trained, 1e9))

    def on_rank():
        model = bamba.load(megatron_config=ConfigUnderTest(tp_size=2))
        model = PeftModel.from_pretrained(model, tmp_path, is_trainable=True).train()
        decay = model.get_base_model().model.layers[0].mamba.A_log.requires_grad_(True)
        cure = "Freeze it, exclude the block from target_modules and modules_to_save, or load the model with tp_size=1."
        with pytest.raises(UnsupportedError, match=rf"A_log of a BambaMixer .*{cure}"):
            model(**bamba.batches[0])
        decay.requires_grad_(False)
        return measure(model)

    expected = measure(PeftModel.from_pretrained(bamba.load(), tmp_path, is_trainable=True).train())
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_restored_after_an_interrupted_forward(fails):
    """A forward ends early in recomputation and on errors."""
    bamba = get_tiny_model("bamba")

    def compare_shapes():
        model = bamba.load(megatron_config=ConfigUnderTest(tp_size=2, recompute="full"))
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if fails:
            model.model.layers[0].mamba.chunk_size = None
            with pytest.raises(TypeError):
                model(**bamba.batches[0])
        else:
            model(**bamba.batches[0]).loss.backward()
        actual = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        return expected == {name: actual[name] for name in expected}

    assert run_ranks(compare_shapes, 2) == [True, True]


def test_weights_are_sharded_at_rest():
    bamba = get_tiny_model("bamba")

    def get_sizes():
        model = bamba.load(megatron_config=ConfigUnderTest(tp_size=2))
        mixer = model.model.layers[0].mamba
        return [
            (parameter.numel(), parameter.to_local().numel())
            for parameter in (
                mixer._parameters["A_log"],
                *(m._parameters["weight"] for m in (mixer.in_proj, mixer.out_proj)),
            )
        ]

    for rank in run_ranks(get_sizes, 2):
        assert all(local * 2 == size for size, local in rank)


def test_recurrent_states_raise_with_use_cache():
    """RWKV creates states of full hidden size, but ranks have local channels; without `use_cache` calls work."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["rwkv"]())

    def on_rank(layout):
        model = tiny_model.load(megatron_config=ConfigUnderTest(**layout)) if layout else tiny_model.load()
        model.eval()
        ids = tiny_model.batches[0]["input_ids"][:2, :6]
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=ids).loss)
            tokens = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False).tolist()
            for call in (
                lambda: model(input_ids=ids, use_cache=True),
                lambda: model.generate(ids, max_new_tokens=3, use_cache=True),
            ):
                if layout:
                    with pytest.raises(
                        UnsupportedError, match="has only its local channels. Call the model and generate"
                    ):
                        call()
        return loss, tokens

    [(loss, tokens)] = run_ranks(on_rank, 1, {})
    for layout in ({"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}):
        for other, written in run_ranks(on_rank, 2, layout):
            assert other == pytest.approx(loss, rel=1e-5) and written == tokens
