"""Tests of custom training loops with pipeline parallelism: Accelerate, torch GradScaler, and user-computed losses."""

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


def run_loop(path, config, train_rows=16, mixed_precision="no", divides=False):
    """Returns the loss, gradient norm and learning rate per batch, then evaluation losses and predictions.

    With `divides` the loop counts batches and divides the loss itself; otherwise Accelerate accumulates.
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
    metrics = []
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
        metrics.append((loss.item(), norm, scheduler.get_last_lr()[0]))
    model.eval()
    losses, predictions = [], []
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        predictions.append(accelerator.gather_for_metrics(outputs.logits.argmax(-1)))
        losses.append(accelerator.gather(outputs.loss).mean().item())
    return torch.tensor(metrics), torch.tensor(losses), torch.cat(predictions)


def require_close(found, expected, config):
    torch.testing.assert_close(found[0], expected[0], rtol=2e-5, atol=1e-7)
    if not config.dp_size:
        # The mean of per-rank means differs from the global mean.
        torch.testing.assert_close(found[1], expected[1], rtol=2e-5, atol=0)
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("config", LAYOUTS, ids=["pp2", "zero1", "zero2 zero bubble", "tp2+pp2"])
def test_loop_matches_single_process(stories, config):
    """Without data parallelism, the last batch has one sample, fewer than the microbatches, and forms its own step."""
    train_rows = 16 if config.dp_size else 17
    expected = run_single_process(run_loop, stories, None, train_rows)
    for result in run_ranks(run_loop, count_ranks(config), stories, config, train_rows):
        require_close(result, expected, config)


def run_long_loop(path, config, blocks, folder, resume=False, kill=False):
    """Runs 50 steps of two batches, evaluates every 10, saves after 20, kills rank 1 after step 25; logs to a file."""
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
        if kill and step == 25 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def read_log(folder):
    """Returns the log entries by step; entries of a resumed run replace earlier ones."""
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {step: values for step, *values in entries}


def test_fifty_steps_with_kill_and_resume(stories, story_texts, tmp_path):
    samples = story_blocks(stories, tuple(story_texts))

    def blocks(which):
        # Cycles through the available blocks.
        available = samples(10_000, 0)
        return [available[index % len(available)] for index in (range(400) if which == "train" else range(8))]

    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
    run_ranks(run_long_loop, 1, stories, None, blocks, one)
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(run_long_loop, 2, stories, PP2, blocks, many, kill=True)
    assert max(read_log(many)) < 50
    run_ranks(run_long_loop, 4, stories, layout(dp_size=2, zero_stage=1), blocks, many, resume=True)
    expected, entries = read_log(one), read_log(many)
    assert entries.keys() == expected.keys() == set(range(1, 51))
    for step, (loss, norm, *held_out) in expected.items():
        # Round-off accumulates over fifty steps, more in norms than in losses, and depends on the CPU.
        assert [entries[step][0], *entries[step][2:]] == pytest.approx([loss, *held_out], rel=2e-5), step
        assert entries[step][1] == pytest.approx(norm, rel=2e-4), step


@pytest.mark.parametrize("config", LAYOUTS[:3], ids=["pp2", "zero1", "zero2"])
def test_loop_that_divides_the_loss(stories, config):
    """The loss scale becomes known only in backward: the first step must be right as well as later ones."""
    expected = run_single_process(run_loop, stories, None, divides=True)
    for result in run_ranks(run_loop, count_ranks(config), stories, config, divides=True):
        require_close(result, expected, config)


def test_bf16_error_is_bounded_by_single_process(stories):
    exact = run_single_process(run_loop, stories, None)
    expected = run_single_process(run_loop, stories, None, mixed_precision="bf16")

    def error(found):
        # The mean: the largest of these errors is a matter of single roundings.
        return ((found[0] - exact[0]).abs() / exact[0].abs().clamp_min(1e-6)).mean().item()

    assert 1e-5 < error(expected) < 0.1
    for config in (PP2, layout(dp_size=2)):
        for result in run_ranks(run_loop, count_ranks(config), stories, config, mixed_precision="bf16"):
            assert error(result) <= 1.5 * error(expected)


class Fp32Linear(torch.nn.Module):
    """Linear layer that computes in fp32 under autocast, as routers and norms do."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


def compute_autocast_gradients(path, config):
    model = load_model(path, config)
    layer = model.model.layers[0]
    if next(local_named_parameters(layer), None) is not None:
        layer.mlp.down_proj = Fp32Linear(layer.mlp.down_proj)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**stack(rows(4, 0))).loss
    loss.backward()
    return {name: gradient.clone() for name, gradient in gather_gradients(model).items()}


def test_scheduled_backward_is_not_autocast(stories):
    """With one microbatch, both runs round the same values in the same way."""
    expected = run_single_process(compute_autocast_gradients, stories, None)
    rank_gradients = run_ranks(compute_autocast_gradients, 2, stories, layout(num_microbatches=1))
    # The two gradient contributions of tied weights are summed in a different order.
    assert max_gradient_error(rank_gradients, expected) < 1e-6


# fp16 with torch's GradScaler


def run_scaled_step(path, config, seed=None):
    """Runs one fp16 autocast step of two batches with a GradScaler; the loss is too small for unscaled fp16 gradients.

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
    for batch_idx in (0, 1):
        waits = config is not None and config.dp_size and batch_idx == 0
        with model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast("cpu", torch.float16):
                loss = model(**shard_batch(model, stack(rows(4, batch_idx))), num_items_in_batch=items).loss
            scaler.scale(loss / 2).backward()
    grads = {name: local_tensor(gradient).clone() / 2**16 for name, gradient in gather_gradients(model).items()}
    scaler.step(optimizer)
    scaler.update()
    return grads, scaler.get_scale()


def max_gradient_error(found, expected):
    """Returns the largest gradient error over all parameters, relative to the largest entry of each gradient."""
    errors = [
        (gradient - expected[name]).abs().max() / expected[name].abs().max()
        for rank in found
        for name, gradient in rank.items()
    ]
    assert len({name for rank in found for name in rank}) == len(expected), "every parameter is on some rank"
    return torch.stack(errors).max().item()


@pytest.mark.parametrize("config", [PP2, layout(dp_size=2)], ids=["pp2", "zero1"])
def test_fp16_gradients_do_not_vanish(stories, config):
    expected, scale = run_single_process(run_scaled_step, stories, None)
    results = run_ranks(run_scaled_step, count_ranks(config), stories, config)
    assert {other for _, other in results} == {scale} == {2.0**16}
    assert max_gradient_error([rank for rank, _ in results], expected) < 5e-3
    # A backward seed of 1 loses most of the gradients.
    unscaled = run_ranks(run_scaled_step, count_ranks(config), stories, config, 1.0)
    assert max_gradient_error([rank for rank, _ in unscaled], expected) > 0.05


# Losses computed outside the model


def compute_log_probs(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0].sum(-1)


def compute_preference_gradients(path, config, accumulate=True):
    """Runs two batches of a hand-written DPO loss: two forwards with gradients, interleaved with others without."""
    base_model = load_model(path, config)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    # In a single process, `prepare` returns a wrapper.
    model = accelerator.prepare(base_model)
    losses = []
    for seed in (0, 1):
        chosen, rejected = (shard_batch(base_model, stack(rows(4, 10 * seed + part, 17))) for part in (0, 1))
        # Without an optimizer, Accelerate cannot detect the end of a step.
        with accelerator.no_sync(model) if seed == 0 else contextlib.nullcontext():
            good = compute_log_probs(model, chosen)
            with torch.no_grad():
                reference = compute_log_probs(model, chosen) - 1.5, compute_log_probs(model, rejected)
            bad = compute_log_probs(model, rejected)
            loss = -F.logsigmoid(0.01 * ((good - reference[0]) - (bad - reference[1]))).mean()
            accelerator.backward(loss)
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return {name: local_tensor(gradient).clone() for name, gradient in gather_gradients(base_model).items()}, losses


@pytest.mark.parametrize(
    "config",
    [
        PP2,
        layout(dp_size=2, zero_stage=2),
        layout(recompute="full", pipeline_schedule="interleaved_1f1b", virtual_stages=2),
    ],
    ids=["pp2", "zero2", "recompute interleaved"],
)
def test_preference_loss_with_several_forwards(stories, config):
    expected, losses = run_single_process(compute_preference_gradients, stories, None)
    results = run_ranks(compute_preference_gradients, count_ranks(config), stories, config)
    assert all(other == pytest.approx(losses, rel=1e-6) for _, other in results)
    assert max_gradient_error([rank for rank, _ in results], expected) < 1e-5


def compute_mixed_loss_gradients(path, config):
    """One backward through two model losses and a loss on logits, with factors unknown before the backward."""
    model = load_model(path, config)
    first, second = (shard_batch(model, stack(rows(4, seed))) for seed in (0, 1))
    losses = model(**first).loss, compute_log_probs(model, second).mean(), model(**second).loss
    (3 * losses[0] + losses[1] / 100 + 0.5 * losses[2]).backward()
    return {name: local_tensor(gradient).clone() for name, gradient in gather_gradients(model).items()}


@pytest.mark.parametrize("config", [PP2, layout(dp_size=2, zero_stage=2)], ids=["pp2", "zero2"])
def test_mixed_losses_in_one_step(stories, config):
    expected = run_single_process(compute_mixed_loss_gradients, stories, None)
    assert (
        max_gradient_error(run_ranks(compute_mixed_loss_gradients, count_ranks(config), stories, config), expected)
        < 1e-5
    )
