"""Tests of logits read after the forward, with a vocab-parallel head that ZeRO-3 shards further over dp ranks.

"+chunks" are layouts without tensor parallelism, whose head is a vocab-parallel head over one rank.
"""

import pytest
import torch

from tests.helpers.training import PatternRuns, gather_full_tensors, make_batch, save_tiny, shard_batch


def run_steps(loop, read_loss):
    for seed in range(2):
        output = loop.model(**shard_batch(loop.model, make_batch(seed)))
        loss = read_loss(output)
        # Many loops call `zero_grad` between forward and backward.
        loop.model.zero_grad()
        loss.backward()
        loop.losses.append(output.loss.item())
        loop.see_gradients(f"step {seed}")
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def z_loss(output):
    return output.logits.float().logsumexp(-1).pow(2).mean()


def add_z_loss(loop):
    run_steps(loop, lambda output: output.loss + 0.01 * z_loss(output))


def train_on_z_loss(loop):
    run_steps(loop, z_loss)


def record_logits(loop, name, output):
    loop.rows(name, output.logits, shard_batch(loop.model, {"rows": torch.arange(4)})["rows"])


def log_logits(loop):
    def read_loss(output):
        record_logits(loop, f"logits {len(loop.losses)}", output)
        return output.loss

    run_steps(loop, read_loss)


def evaluate_logits(loop):
    loop.step(0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            record_logits(loop, context.__name__, loop.model(**shard_batch(loop.model, make_batch(1))))
    loop.step(1)


def differentiate_logits(loop):
    output = loop.model(**shard_batch(loop.model, make_batch(0)))
    names, parameters = zip(*loop.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(z_loss(output), parameters)
    loop.seen |= gather_full_tensors(loop.model, dict(zip(names, gradients, strict=True)))
    loop.step(0)


LOOP_PATTERNS = {
    function.__name__: function
    for function in (add_z_loss, train_on_z_loss, log_logits, evaluate_logits, differentiate_logits)
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, tie_word_embeddings=request.param)
    return PatternRuns(folder, LOOP_PATTERNS)


@pytest.mark.filterwarnings("ignore:Full logits are")
@pytest.mark.parametrize(
    ("text", "loop_pattern"),
    [
        *(
            (text, loop_pattern)
            for text in ("tp2+dp2+zero3", "tp2+dp2", "dp2+zero1+chunks", "dp2+zero3+chunks")
            for loop_pattern in LOOP_PATTERNS
            if loop_pattern != "differentiate_logits"
        ),
        ("tp2", "differentiate_logits"),
    ],
)
def test_loop_patterns_match_single_process(runs, text, loop_pattern):
    runs.compare(text, loop_pattern)


@pytest.mark.filterwarnings("ignore:Full logits are")
@pytest.mark.parametrize("text", ["tp2+dp2+zero3", "tp2+dp2", "dp2+zero3+chunks"])
def test_autograd_grad_is_rejected_with_data_parallelism(runs, text):
    runs.refused(
        text, "differentiate_logits", "torch.autograd.grad with respect to parameters of a data parallel model"
    )
