"""Plain loops over pipeline stages against one process: Accelerate's, torch's own, and losses computed outside."""

import contextlib
import dataclasses
import json
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_megatron import RankError, local_named_parameters, prepare_optimizer
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import count_ranks, gather_gradients, load_model, shard_batch
from tests.helpers.references import run_single_process
from tests.integration.integrations.trainer.test_trainer import rows
from tests.integration.pipeline_parallel.test_trainer import story_blocks

PP2 = ConfigUnderTest(pp_size=2, num_microbatches=2)


def layout(**fields):
    return dataclasses.replace(PP2, **fields)


LAYOUTS = [
    PP2,
    layout(dp_size=2, zero_stage=1),
    layout(dp_size=2, zero_stage=2, pipeline_schedule="interleaved_zero_bubble", virtual_stages=1, num_microbatches=4),
    layout(tp_size=2),
]


def stack(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


def loop(path, config, train_rows=16, mixed_precision="no", divides=False):
    """Losses, norms and rates of every batch, and an evaluation.

    With `divides` the loop counts and divides itself, as many do; else it leaves that to Accelerate.
    """
    dp_size = 1 if config is None else config.dp_size or 1
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=1 if divides else 2, mixed_precision=mixed_precision
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / accelerator.num_processes))
    train = DataLoader(rows(train_rows, 0), batch_size=4 // dp_size)
    evaluation = DataLoader(rows(8, 1), batch_size=4 // dp_size)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    numbers = []
    for index, batch in enumerate(train):
        steps = index % 2 == 1 if divides else None
        if divides:
            context = contextlib.nullcontext() if steps else accelerator.no_sync(model)
        else:
            context = accelerator.accumulate(model)
        norm = 0.0
        with context:
            loss = model(**batch).loss
            accelerator.backward(loss / 2 if divides else loss)
            if accelerator.sync_gradients if steps is None else steps:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            if steps is not False:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        numbers.append((loss.item(), norm, scheduler.get_last_lr()[0]))
    model.eval()
    losses, predictions = [], []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        predictions.append(accelerator.gather_for_metrics(outputs.logits.argmax(-1)))
        losses.append(accelerator.gather(outputs.loss).mean().item())
    return torch.tensor(numbers), torch.tensor(losses), torch.cat(predictions)


def check(found, expected, config):
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-7)
    if not config.dp_size:
        # The mean of two ranks' means is another number.
        torch.testing.assert_close(found[1], expected[1], rtol=2e-5, atol=0)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("config", LAYOUTS, ids=["pp2", "zero1", "zero2 zero bubble", "tp2+pp2"])
def test_loop_equals_one_process(stories, config):
    """On one pipeline the last batch has one row, fewer than microbatches, and is a step of its own."""
    train_rows = 16 if config.dp_size else 17
    expected = run_single_process(loop, stories, None, train_rows)
    for found in run_ranks(loop, count_ranks(config), stories, config, train_rows):
        check(found, expected, config)


def long_loop(path, config, blocks, folder, resume=False, kill=False):
    """50 steps of two batches, evaluated every 10, saved after 20; rank 1 is killed in step 26. Logs to a file."""
    dp_size = 1 if config is None else config.dp_size or 1
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    train = DataLoader(blocks("train"), batch_size=4 // dp_size)
    evaluation = DataLoader(blocks("evaluation"), batch_size=4 // dp_size)
    model, optimizer, train, evaluation = accelerator.prepare(model, optimizer, train, evaluation)
    start = 20 if resume else 0
    if resume:
        accelerator.load_state(folder / "saved")
    losses = []
    for index, batch in enumerate(accelerator.skip_first_batches(train, 2 * start), 2 * start):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if not accelerator.sync_gradients:
                continue
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5).item()
            optimizer.step()
            optimizer.zero_grad()
        step, entry = (index + 1) // 2, [sum(losses) / 2, norm]
        losses.clear()
        if step % 10 == 0:
            model.eval()
            with torch.no_grad():
                held_out = [accelerator.gather(model(**batch).loss).mean().item() for batch in evaluation]
            entry.append(sum(held_out) / len(held_out))
            model.train()
        if accelerator.is_main_process:
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps([step, *entry]) + "\n")
        if step == 20 and not resume:
            accelerator.save_state(folder / "saved")
        if kill and step == 25 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def read_log(folder):
    """Entries by step; a resumed run writes those after the save once more."""
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {step: numbers for step, *numbers in entries}


def test_fifty_steps_with_a_kill_and_a_resume_on_another_layout(stories, story_texts, tmp_path):
    samples = story_blocks(stories, tuple(story_texts))

    def blocks(which):
        # As many as are there, again and again.
        found = samples(10_000, 0)
        return [found[index % len(found)] for index in (range(400) if which == "train" else range(8))]

    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
    run_ranks(long_loop, 1, stories, None, blocks, one)
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(long_loop, 2, stories, PP2, blocks, many, kill=True)
    assert max(read_log(many)) < 50
    run_ranks(long_loop, 4, stories, layout(dp_size=2, zero_stage=1), blocks, many, resume=True)
    expected, found = read_log(one), read_log(many)
    assert found.keys() == expected.keys() == set(range(1, 51))
    for step, (loss, norm, *held_out) in expected.items():
        # Fifty steps carry round-off on, which norms show more than losses: another processor rounds otherwise.
        assert [found[step][0], *found[step][2:]] == pytest.approx([loss, *held_out], rel=2e-5), step
        assert found[step][1] == pytest.approx(norm, rel=2e-4), step


@pytest.mark.parametrize("config", LAYOUTS[:3], ids=["pp2", "zero1", "zero2"])
def test_a_loop_that_divides_the_loss_itself(stories, config):
    """The scale is seen in backward only: right the first time, and every time after."""
    expected = run_single_process(loop, stories, None, divides=True)
    for found in run_ranks(loop, count_ranks(config), stories, config, divides=True):
        check(found, expected, config)


def test_bf16_is_as_near_to_fp32_as_one_process(stories):
    exact = run_single_process(loop, stories, None)
    expected = run_single_process(loop, stories, None, mixed_precision="bf16")

    def error(found):
        return ((found[0] - exact[0]).abs() / exact[0].abs().clamp_min(1e-6)).max().item()

    assert 1e-5 < error(expected) < 0.1
    for config in (PP2, layout(dp_size=2)):
        for found in run_ranks(loop, count_ranks(config), stories, config, mixed_precision="bf16"):
            assert error(found) <= 1.5 * error(expected)


class InFullPrecision(torch.nn.Module):
    """A part of a model that computes in fp32 whatever autocast says, as routers and norms do."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


def autocast_gradients(path, config):
    model = load_model(path, config)
    layer = model.model.layers[0]
    if next(local_named_parameters(layer), None) is not None:
        layer.mlp.down_proj = InFullPrecision(layer.mlp.down_proj)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**stack(rows(4, 0))).loss
    loss.backward()
    return {name: gradient.clone() for name, gradient in gather_gradients(model).items()}


def test_the_backward_inside_a_forward_is_not_autocast(stories):
    """With one microbatch both round the same numbers in the same way."""
    expected = run_single_process(autocast_gradients, stories, None)
    found = run_ranks(autocast_gradients, 2, stories, layout(num_microbatches=1))
    # Tied weights get their two parts in another order.
    assert worst(found, expected) < 1e-6


# fp16 with torch's own scaler


def scaled(path, config, seed=None):
    """One step of two batches in fp16 autocast with a loss scaler, of a loss too small for unscaled fp16 gradients.

    Returns:
        the unscaled gradients, and the scale after the step.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model = load_model(path, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if config is not None:
        optimizer = prepare_optimizer(optimizer)
    if seed is not None:
        parallel_state(model).pipeline.loss_scale.usual = lambda: seed
    items = 2**18 // (1 if config is None else config.dp_size or 1)
    for number in (0, 1):
        waits = config is not None and config.dp_size and number == 0
        with model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.float16):
                loss = model(**shard_batch(model, stack(rows(4, number))), num_items_in_batch=items).loss
            scaler.scale(loss / 2).backward()
    found = {name: local_tensor(gradient).clone() / 2**16 for name, gradient in gather_gradients(model).items()}
    scaler.step(optimizer)
    scaler.update()
    return found, scaler.get_scale()


def worst(found, expected):
    """The largest error of a gradient, in parts of its parameter's largest entry."""
    errors = [
        (gradient - expected[name]).abs().max() / expected[name].abs().max()
        for rank in found
        for name, gradient in rank.items()
    ]
    assert len({name for rank in found for name in rank}) == len(expected), "every parameter is on some rank"
    return torch.stack(errors).max().item()


@pytest.mark.parametrize("config", [PP2, layout(dp_size=2)], ids=["pp2", "zero1"])
def test_fp16_gradients_do_not_vanish(stories, config):
    expected, scale = run_single_process(scaled, stories, None)
    found = run_ranks(scaled, count_ranks(config), stories, config)
    assert {other for _, other in found} == {scale} == {2.0**16}
    assert worst([rank for rank, _ in found], expected) < 5e-3
    # What a seed of 1 would have left of them.
    unscaled = run_ranks(scaled, count_ranks(config), stories, config, 1.0)
    assert worst([rank for rank, _ in unscaled], expected) > 0.05


# Losses computed outside of the model


def log_probabilities(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0].sum(-1)


def preferences(path, config, accumulate=True):
    """Two batches of a hand-written DPO loss: two forwards with gradients, others without in between."""
    loaded = load_model(path, config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # In one process a wrapper around it.
    model = accelerator.prepare(loaded)
    losses = []
    for seed in (0, 1):
        chosen, rejected = (shard_batch(loaded, stack(rows(4, 10 * seed + part, 17))) for part in (0, 1))
        # No optimizer here to tell Accelerate when a step ends.
        with accelerator.no_sync(model) if seed == 0 else contextlib.nullcontext():
            good = log_probabilities(model, chosen)
            with torch.no_grad():
                reference = log_probabilities(model, chosen) - 1.5, log_probabilities(model, rejected)
            bad = log_probabilities(model, rejected)
            loss = -F.logsigmoid(0.01 * ((good - reference[0]) - (bad - reference[1]))).mean()
            accelerator.backward(loss)
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return {name: local_tensor(gradient).clone() for name, gradient in gather_gradients(loaded).items()}, losses


@pytest.mark.parametrize(
    "config",
    [
        PP2,
        layout(dp_size=2, zero_stage=2),
        layout(recompute="full", pipeline_schedule="interleaved_1f1b", virtual_stages=2),
    ],
    ids=["pp2", "zero2", "recompute interleaved"],
)
def test_a_preference_loss_of_several_forwards(stories, config):
    expected, losses = run_single_process(preferences, stories, None)
    found = run_ranks(preferences, count_ranks(config), stories, config)
    assert all(other == pytest.approx(losses, rel=1e-6) for _, other in found)
    assert worst([rank for rank, _ in found], expected) < 1e-5


def mixed(path, config):
    """The model's own losses and one on its logits, in one backward, with factors that are not seen before it."""
    model = load_model(path, config)
    first, second = (shard_batch(model, stack(rows(4, seed))) for seed in (0, 1))
    losses = model(**first).loss, log_probabilities(model, second).mean(), model(**second).loss
    (3 * losses[0] + losses[1] / 100 + 0.5 * losses[2]).backward()
    return {name: local_tensor(gradient).clone() for name, gradient in gather_gradients(model).items()}


@pytest.mark.parametrize("config", [PP2, layout(dp_size=2, zero_stage=2)], ids=["pp2", "zero2"])
def test_both_ways_in_one_step(stories, config):
    expected = run_single_process(mixed, stories, None)
    assert worst(run_ranks(mixed, count_ranks(config), stories, config), expected) < 1e-5
