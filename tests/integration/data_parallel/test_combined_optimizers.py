"""Tests of Muon as scripts train with it: with another optimizer for the parameters that are no matrices."""

import dataclasses
import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_megatron import ConfigError, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import distributed_optimizer
from hf_megatron.data_parallel.combined_optimizers import find_parts
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    measure_movement_error,
    parameters_unchanged,
    parse_layout,
    shard_batch,
)
from tests.helpers.optimizers import ROUNDED_LIMIT, ROWS, list_matrices, list_others
from tests.helpers.training import gather_full_tensors, make_batch
from tests.integration.data_parallel.test_layer_wise import Fp32Muon, load, read_start

LIMIT = 2e-4


class Combined(torch.optim.Optimizer):
    """Steps several optimizers, as scripts write it for Trainer, which takes one."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"parts": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["parts"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def make_combined(model):
    matrices = prepare_optimizer(Fp32Muon(list_matrices(model), lr=1e-2), layer_wise=True)
    return Combined(matrices, torch.optim.AdamW(list_others(model), lr=1e-3, eps=1e-4))


def make_moonlight(model):
    [optimizer] = ROWS["MoonlightMuon"].make(model)
    return prepare_optimizer(optimizer, layer_wise=True)


MAKERS = {"combined": (make_combined, LIMIT), "Moonlight": (make_moonlight, ROUNDED_LIMIT)}


def run_trainer(path, text, folder, name, resume=None):
    """Returns the logged losses and norms of clipped steps, and the full weights on the ranks that gather them."""
    model = load(path, text)
    replicas = 1 if text is None else parse_layout(text).dp_size or 1
    samples = [{key: value[row] for key, value in make_batch(seed).items()} for seed in range(6) for row in range(4)]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        lr_scheduler_type="linear",
        max_grad_norm=0.3,
        per_device_train_batch_size=4 // replicas,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    optimizers = (MAKERS[name][0](model), None)
    trainer = Trainer(model=model, args=arguments, train_dataset=samples, optimizers=optimizers)
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]
    return logs, gather_full_tensors(model, dict(local_named_parameters(model)))


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    @functools.cache
    def run(name):
        [result] = run_ranks(run_trainer, 1, tiny, None, tmp_path_factory.mktemp("alone"), name)
        return result

    return run


def compare(results, expected, tiny, limit):
    compared = 0
    for logs, weights in results:
        assert len(logs) == 8
        assert logs == pytest.approx(expected[0], rel=max(limit, 1e-3))
        if weights:
            compared += 1
            assert measure_movement_error(weights, expected[1], read_start(tiny)) < limit
    assert compared


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2", "dp2", "dp2+zero0", "dp2+zero3", "tp2+dp2"])
def test_trainer_matches_single_process(tiny, alone, tmp_path, text, name):
    results = run_ranks(run_trainer, count_ranks(parse_layout(text)), tiny, text, tmp_path, name, timeout=120)
    compare(results, alone(name), tiny, MAKERS[name][1])


@pytest.mark.parametrize("name", MAKERS)
def test_trainer_resumes_on_other_layouts(tiny, alone, tmp_path, name):
    run_ranks(run_trainer, 2, tiny, "tp2", tmp_path, name, timeout=120)
    checkpoint = str(tmp_path / "checkpoint-2")
    for text in ("pp2", "dp2"):
        results = run_ranks(run_trainer, 2, tiny, text, tmp_path / text, name, checkpoint, timeout=120)
        compare(results, alone(name), tiny, MAKERS[name][1])


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(**shard_batch(model, make_batch(step))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()


def train_combined(path, text):
    model = load(path, text)
    train(model, prepare_optimizer(make_combined(model)))
    return gather_full_tensors(model, dict(local_named_parameters(model)))


def test_unprepared_part_is_detected(tiny):
    """The seeded fault: one of the parts steps without the exchange of gradients."""

    def on_rank():
        distributed_optimizer.find_parts = lambda optimizer: find_parts(optimizer)[:1]
        with pytest.raises(ConfigError, match="AdamW is not prepared"):
            train_combined(tiny, "dp2")

    run_ranks(on_rank, 2)
    for weights in run_ranks(train_combined, 2, tiny, "dp2"):
        assert measure_movement_error(weights, train_combined(tiny, None), read_start(tiny)) < LIMIT


def test_wrapper_of_one_optimizer_has_no_parts(tiny):
    """Lookahead and SAM edit the parameters of the optimizer that they wrap."""
    model = load(tiny, None)
    assert find_parts(Combined(torch.optim.SGD(model.parameters(), lr=0.1))) == []
    two = Combined(torch.optim.SGD(list_matrices(model), lr=0.1), torch.optim.SGD(list_others(model), lr=0.1))
    assert find_parts(two) == two.optimizers


@pytest.mark.parametrize("poisoned", ["embed_tokens", "q_proj"])
@pytest.mark.parametrize("text", ["tp2", "dp2", "dp2+zero3"])
def test_gradients_of_all_optimizers_are_checked(tiny, text, poisoned):
    """No optimizer of the model steps if the gradients of one of them are not finite."""

    def on_rank():
        model = load(tiny, text)
        optimizer, before = prepare_optimizer(make_combined(model)), clone_parameters(model)
        model(**shard_batch(model, make_batch(0))).loss.backward()
        for name, parameter in model.named_parameters():
            if poisoned in name:
                parameter.grad = parameter.grad * float("nan")
        optimizer.step()
        return parameters_unchanged(model, before)

    assert run_ranks(on_rank, 2) == [True, True]


@pytest.mark.parametrize("text", ["tp2", "dp2", "dp2+zero3", "pp2"])
def test_configured_clipping_is_that_of_all_optimizers(tiny, text):
    """`gradient_clipping` takes the norm over the model, not over the parameters of the optimizer that steps first."""

    def run(config):
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=config).train()
        optimizer = prepare_optimizer(make_combined(model))
        for step in range(2):
            optimizer.zero_grad()
            model(**shard_batch(model, make_batch(step))).loss.backward()
            if config is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        return gather_full_tensors(model, dict(local_named_parameters(model)))

    expected = run(None)
    for weights in run_ranks(run, 2, dataclasses.replace(parse_layout(text), gradient_clipping=0.3)):
        assert not weights or measure_movement_error(weights, expected, read_start(tiny)) < LIMIT
