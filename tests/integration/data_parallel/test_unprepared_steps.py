"""Tests of the precision in which optimizers keep half-precision weights, on one rank and on layouts."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import unprepared_steps
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    make_batch,
    parameters_unchanged,
    parse_layout,
    shard_batch,
)
from tests.helpers.references import run_single_process


def _train(path, config, *, dtype=torch.bfloat16, autocast=False):
    arguments = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **arguments).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**shard_batch(model, make_batch(seed, 4))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {str(state["exp_avg"].dtype) for state in optimizer.state.values()}
    return moments, {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rank_without_main_params_raises_before_weights_change(stories, dtype):
    model = AutoModelForCausalLM.from_pretrained(stories, dtype=dtype, megatron_config=MegatronConfig())
    before = clone_parameters(model)
    model(**make_batch(0, 4)).loss.backward()
    with pytest.raises(
        ConfigError, match=r"fp32_main_params = True, .* AdamW would keep weights .* in (bfloat|float)16"
    ):
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    assert parameters_unchanged(model, before)


def test_model_from_config_raises_too():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, megatron_config=MegatronConfig())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    with pytest.raises(ConfigError, match="fp32_main_params"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert isinstance(model, LlamaForCausalLM)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (MegatronConfig(fp32_main_params=False), {}),
        (MegatronConfig(), {"dtype": torch.float32, "autocast": True}),
    ],
    ids=["stock optimizer", "fp32 weights"],
)
def test_cures_train_as_stock(stories, config, arguments):
    with pytest.raises(ConfigError, match="fp32_main_params"):
        _train(stories, MegatronConfig())
    moments, expected = run_single_process(_train, stories, None, **arguments)
    found, weights = _train(stories, config, **arguments)
    assert found == moments
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


def test_comparison_notices_missing_check(stories, monkeypatch):
    monkeypatch.setattr(unprepared_steps, "_require_main_params", lambda *args: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_one_rank_without_main_params_raises_before_weights_change(stories, torch.bfloat16)


def _moments_on_ranks(path, config):
    return sorted(_train(path, config)[0])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3"])
@pytest.mark.parametrize(("keeps_fp32", "dtype"), [(True, "torch.float32"), (False, "torch.bfloat16")])
def test_moments_have_one_dtype_on_every_layout(stories, layout, keeps_fp32, dtype):
    config = replace(parse_layout(layout), fp32_main_params=keeps_fp32)
    for moments in run_ranks(_moments_on_ranks, count_ranks(config), stories, config, timeout=100):
        assert moments == [dtype]


class SignDescent(torch.optim.Optimizer):
    """A class of a script, for a single process or with a collective in its step."""

    def __init__(self, parameters, communicates):
        super().__init__(parameters, {})
        self.communicates = communicates

    @torch.no_grad()
    def step(self, closure=None):
        if self.communicates:
            dist.all_reduce(torch.zeros(1))
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(1e-3 * parameter.grad / (parameter.grad.norm() + 1e-6))


def _descend(path, config, *, communicates=False, prepares=False):
    arguments = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(path, **arguments).train()
    optimizer = SignDescent(model.parameters(), communicates)
    if prepares:
        optimizer = prepare_optimizer(optimizer, layer_wise=True)
    losses = []
    for seed in range(3):
        loss = model(**make_batch(seed, 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("prepares", [False, True])
def test_optimizer_that_communicates_is_replaced(stories, prepares):
    def on_rank():
        config = parse_layout("tp2")
        with pytest.raises(UnsupportedError, match="SignDescent communicates over all ranks in its step"):
            _descend(stories, config, communicates=True)
        return _descend(stories, config, prepares=prepares)

    assert run_ranks(on_rank, 2) == [pytest.approx(_descend(stories, None), rel=1e-5)] * 2
