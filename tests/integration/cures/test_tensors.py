"""Tests that follow the cures in errors of tensor operations: off-stage, sharded and quantized weights, and RNG."""

import functools

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig

from hf_megatron import CheckpointError, MegatronConfig, UnsupportedError, shard_safe
from hf_megatron.core.communication import rng
from hf_megatron.core.communication.full_tensor import gather_full_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.testing.measure import _full
from hf_megatron.testing.tiny_model import draw_parameters
from tests.helpers.dp_training import shard_batch
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import make_batch, parse_layout, save_tiny
from tests.integration.checkpoint.test_user_checkpoints import block, compare_gradients, dropout, make_forward

checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, num_hidden_layers=4, tie_word_embeddings=False)
    return path


def load(path, text=None, **kwargs):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config, **kwargs).train()


def test_off_stage_weights_and_gradients_are_gathered(folder, tmp_path):
    def on_rank():
        model = load(folder, "pp2")
        model(**make_batch(0)).loss.backward()
        message = (
            r"Use model\.save_pretrained\(folder\) or Accelerator\.get_state_dict\(model\) to gather weights, and "
            r"torch\.nn\.utils\.get_total_norm for gradient norms; call them on all ranks\."
        )
        with pytest.raises(UnsupportedError, match=message):
            torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
        with pytest.raises(UnsupportedError, match=message):
            {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        model.save_pretrained(tmp_path)
        state = Accelerator(cpu=True).get_state_dict(model)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        return norm.item(), state

    stock = load(folder)
    stock(**make_batch(0)).loss.backward()
    expected = torch.nn.utils.get_total_norm([parameter.grad for parameter in stock.parameters()]).item()
    ranks = run_ranks(on_rank, 2)
    assert [norm for norm, _ in ranks] == pytest.approx([expected] * 2, rel=1e-5)
    weights = stock.state_dict()
    for gathered in (load_file(tmp_path / "model.safetensors"), ranks[0][1]):
        assert gathered.keys() == weights.keys()
        assert all(torch.equal(gathered[name], tensor) for name, tensor in weights.items())


def test_views_are_edited_in_separate_calls(folder):
    name = "model.layers.0.mlp.down_proj.weight"

    def on_rank():
        model = load(folder, "dp2+zero2")
        model(**shard_batch(model, make_batch(0))).loss.backward()
        gradient, other = model.get_parameter(name).grad, torch.ones(3)
        with pytest.raises(
            UnsupportedError, match=r"writes to a view of a sharded tensor .*Edit them in separate calls"
        ):
            torch._foreach_mul_([gradient[:4], other], 2.0)
        gradient[:4].mul_(2.0)
        other.mul_(2.0)
        return gradient + 0, other

    stock = load(folder)
    stock(**make_batch(0)).loss.backward()
    expected = stock.get_parameter(name).grad
    expected[:4].mul_(2.0)
    for gradient, other in run_ranks(on_rank, 2):
        torch.testing.assert_close(gradient, expected)
        assert torch.equal(other, torch.full((3,), 2.0))


def test_partial_sum_is_edited_after_full_tensor(folder):
    name = "model.layers.0.mlp.down_proj.weight"

    def on_rank():
        total = load(folder, "tp2").get_parameter(name).detach().sum(1)
        with pytest.raises(
            UnsupportedError, match=r"pending reduction\) cannot be edited\. Call full_tensor\(\) and edit"
        ):
            total[torch.tensor([0, 1])] = torch.tensor([3.0, 4.0])
        total = total.full_tensor()
        total[torch.tensor([0, 1])] = torch.tensor([3.0, 4.0])
        return total

    expected = load(folder).get_parameter(name).detach().sum(1)
    expected[:2] = torch.tensor([3.0, 4.0])
    for total in run_ranks(on_rank, 2):
        torch.testing.assert_close(total, expected)


def test_double_backward_on_one_rank(folder):
    def compute_gradients(model):
        model(**make_batch(0)).loss.backward(create_graph=True)
        weight = model.model.norm.weight
        gradient, weight.grad = weight.grad, None
        gradient.square().sum().backward()
        return gradient.detach(), weight.grad.detach()

    def get_error():
        with pytest.raises(UnsupportedError) as error:
            load(folder, "tp2")(**make_batch(0)).loss.backward(create_graph=True)
        return str(error.value)

    for error in run_ranks(get_error, 2):
        assert "create_graph=True is not supported with a vocab-parallel head" in error
        assert "Load the model with tp_size=1 in a job of one rank." in error
    config = MegatronConfig(tp_size=1)
    [gradients] = run_ranks(
        lambda: compute_gradients(AutoModelForCausalLM.from_pretrained(folder, megatron_config=config).train()), 1
    )
    for gradient, expected in zip(gradients, compute_gradients(load(folder)), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_random_states_suffice_for_immediate_backwards(tmp_path):
    """Two forwards in flight need more states than are kept; one at a time, or stock checkpointing, does not."""
    save_tiny(tmp_path, num_hidden_layers=2)

    def on_rank():
        rng._KNOWN = 4
        message = r"Call backward\(\) before running further forward passes, or use gradient_checkpointing_enable\(\)\."
        with pytest.raises(UnsupportedError, match=message):
            compare_gradients(tmp_path, "tp2+sp", block, False)
        runs = []
        for kind in ("plain", "checkpointed", "enabled"):
            model = load(tmp_path, "tp2+sp")
            again = (lambda function, x: function(x)) if kind != "checkpointed" else checkpoint
            for layer in model.model.layers:
                plain = type(layer.mlp).forward
                layer.mlp.forward = shard_safe(lambda x, mlp=layer.mlp, plain=plain: dropout(plain(mlp, dropout(x))))
                layer.forward = make_forward(layer, block, again)
            if kind == "enabled":
                model.gradient_checkpointing_enable()
            torch.manual_seed(5)
            for seed in range(2):
                model(**make_batch(seed)).loss.backward()
            gradients = _full(model, {name: parameter.grad for name, parameter in model.named_parameters()})
            runs.append(gradients)
        return runs

    plain, *others = run_ranks(on_rank, 2)[0]
    for gradients in others:
        for name, expected in plain.items():
            torch.testing.assert_close(gradients[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_shared_weights_get_their_own_parameters(folder, tmp_path):
    def on_rank():
        model = load(folder, "tp2")
        first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
        second.up_proj.weight = first.up_proj.weight
        message = (
            r"Give each its own parameter \(`torch\.nn\.Parameter\(weight\.detach\(\)\.clone\(\)\)`\) before saving"
        )
        with pytest.raises(CheckpointError, match=message):
            model.save_pretrained(tmp_path)
        second.up_proj.weight = torch.nn.Parameter(first.up_proj.weight.detach().clone())
        model.save_pretrained(tmp_path)

    run_ranks(on_rank, 2)
    saved, weights = load_file(tmp_path / "model.safetensors"), load(folder).state_dict()
    for number in range(2):
        expected = weights["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(saved[f"model.layers.{number}.mlp.up_proj.weight"], expected)


def test_quantized_weights_are_dequantized_or_adapters_are_saved(tmp_path):
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"](), changes=changes, microbatches=2, batch_size=4)
    name = "model.layers.0.self_attn.q_proj.weight"

    def on_rank():
        config = MegatronConfig(tp_size=2)
        model = tiny_model.load(megatron_config=config, quantization_config=NF4)
        message = r"Call model\.dequantize\(\) first, or load the model without quantization_config\."
        with pytest.raises(UnsupportedError, match=message):
            model.get_parameter(name) * 2
        with pytest.raises(UnsupportedError, match=r"Save the adapter, or call model\.dequantize\(\) first\."):
            torch.save(model.state_dict(), tmp_path / "state.pt")
        wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
        draw_parameters(wrapped, 0, trained_only=True)
        wrapped.save_pretrained(tmp_path / "adapter")
        base = wrapped.unload()
        base.dequantize(torch.float32)
        rank = torch.distributed.get_rank()
        torch.save(base.state_dict(), tmp_path / f"state{rank}.pt")
        dense = tiny_model.load(megatron_config=MegatronConfig(tp_size=2)).get_parameter(name)
        return gather_full_tensor(base.get_parameter(name) * 2), gather_full_tensor(dense * 2)

    expected = tiny_model.load().get_parameter(name).detach() * 2
    for dequantized, dense in run_ranks(on_rank, 2):
        assert torch.equal(dense, expected) and 0 < (dequantized - expected).norm() < 0.2 * expected.norm()
    assert (tmp_path / "state0.pt").exists() and (tmp_path / "state1.pt").exists()
    PeftModel.from_pretrained(tiny_model.load(), tmp_path / "adapter")


def test_packed_documents_without_cache(folder):
    ids = torch.arange(3, 27).view(2, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    batch = {"input_ids": ids, "position_ids": positions, "labels": ids}

    def train(model, **kwargs):
        loss = model(**batch, **kwargs).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
        return loss.item(), norm.item()

    def on_rank():
        model = load(folder, "tp2")
        message = r"Call LlamaForCausalLM with use_cache=False, or set model\.config\.use_cache = False\."
        with pytest.raises(UnsupportedError, match=message):
            train(model)
        results = [train(model, use_cache=False)]
        model.config.use_cache = False
        return [*results, train(model)]

    expected = train(load(folder), use_cache=False)
    for results in run_ranks(on_rank, 2):
        for result in results:
            assert result == pytest.approx(expected, rel=1e-5)
