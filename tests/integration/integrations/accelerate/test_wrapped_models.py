"""Tests of user modules that wrap a parallelized model: supported without additional weights, else rejected."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from tests.integration.integrations.trainer.test_trainer import rows

LAYOUTS = [
    MegatronConfig(tp_size=2),
    MegatronConfig(dp_size=2),
    MegatronConfig(dp_size=2, zero_stage=3),
    MegatronConfig(pp_size=2),
]


class LossWrapper(nn.Module):
    """Wrapper as in Lightning-style scripts; `head` is a second name for a weight of the model."""

    def __init__(self, model):
        super().__init__()
        self.lm = model
        self.head = model.lm_head

    def forward(self, **batch):
        return self.lm(**batch).loss


class RewardModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.backbone = model
        self.score = nn.Linear(model.config.hidden_size, 1)


class Backbone(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layers = model.model.layers


def run_loop(path, config, folder, mixed_precision):
    wrapper = LossWrapper(AutoModelForCausalLM.from_pretrained(path, megatron_config=config)).train()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / accelerator.num_processes))
    data = DataLoader(rows(16, 0), batch_size=4 // accelerator.num_processes)
    module, optimizer, data, scheduler = accelerator.prepare(wrapper, optimizer, data, scheduler)
    steps = []
    for batch in data:
        with accelerator.accumulate(module):
            loss = module(**batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(module.parameters(), 0.5) if accelerator.sync_gradients else 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps.append((accelerator.reduce(loss.detach(), reduction="mean").item(), float(norm)))
    weights = accelerator.get_state_dict(module)
    if config is not None:
        assert accelerator.prepare(wrapper) is wrapper is module
        state = accelerator.save_state(str(folder / "state"))
        with torch.no_grad():
            wrapper.lm.model.norm.weight.zero_()
        accelerator.load_state(str(state))
        assert not accelerator.is_main_process or {*weights} == {*wrapper.state_dict()}
    again = accelerator.get_state_dict(module)
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    return steps, {name.removeprefix("module."): tensor for name, tensor in weights.items()}


def compare(stories, tmp_path, config, mixed_precision, tolerance):
    [(expected, weights)] = run_ranks(run_loop, 1, stories, None, tmp_path, mixed_precision)
    results = run_ranks(run_loop, 2, stories, config, tmp_path, mixed_precision)
    for steps, _ in results:
        torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=tolerance, atol=1e-7)
    parallel_weights = results[0][1]
    assert parallel_weights.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(parallel_weights[name], tensor, rtol=0, atol=1e-3 * tolerance / 2e-5, msg=name)


@pytest.mark.parametrize("config", LAYOUTS, ids=MegatronConfig.layout)
def test_wrapper_without_weights_is_prepared(stories, tmp_path, config):
    compare(stories, tmp_path, config, "no", 2e-5)


def test_mixed_precision_applies_to_wrapper_forward(stories, tmp_path):
    compare(stories, tmp_path, LAYOUTS[0], "bf16", 2e-2)


@pytest.mark.parametrize("config", LAYOUTS, ids=MegatronConfig.layout)
def test_unsupported_wrappers_are_rejected(stories, config, tmp_path):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
        accelerator = Accelerator(cpu=True)
        reward, backbone, two = RewardModel(model), Backbone(model), nn.ModuleList([model, RewardModel(model)])
        for module, text in (
            (reward, r"of a RewardModel: it contains a parallelized \w+ForCausalLM and weights .*\(score.weight \(1, "),
            (two, r"not part of it \(1.score.weight"),
            (backbone, r"of a Backbone: it contains model\.layers\.[\w.]+ of a parallelized (FSDP)?Llama"),
        ):
            with pytest.raises(UnsupportedError, match=text) as caught:
                accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
            assert "when from_pretrained loads it" in str(caught.value)
            assert not accelerator._models and not accelerator._optimizers
        for parameter in reward.parameters():
            parameter.requires_grad_(False)
        assert accelerator.prepare(reward) is reward
        with pytest.raises(UnsupportedError, match="DistributedDataParallel: a parallelized model"):
            nn.parallel.DistributedDataParallel(LossWrapper(model))
        with pytest.raises(UnsupportedError, match="Trainer of a RewardModel: it contains a parallelized"):
            Trainer(reward, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]), train_dataset=rows(4, 0))

    run_ranks(on_rank, 2)


def test_module_with_two_parallelized_models_is_rejected(stories):
    def on_rank():
        models = [AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[1]) for _ in range(2)]
        with pytest.raises(UnsupportedError, match=r"contains 2 parallelized models \(\w+, \w+\). Prepare each"):
            Accelerator(cpu=True).prepare(nn.ModuleList(models))

    run_ranks(on_rank, 2)
