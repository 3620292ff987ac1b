"""Logits that are read behind the forward, where a split head is split once more over the dp ranks (stage 3)."""

import pytest
import torch

from tests.helpers.training import PatternRuns, gather_full_tensors, local_samples, make_batch, save_tiny


def steps(loop, read_loss):
    for seed in range(2):
        output = loop.model(**local_samples(loop.model, make_batch(seed)))
        loss = read_loss(output)
        # Between forward and backward, as many loops have it.
        loop.model.zero_grad()
        loss.backward()
        loop.losses.append(output.loss.item())
        loop.see_gradients(f"step {seed}")
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def z_loss(output):
    return output.logits.float().logsumexp(-1).pow(2).mean()


def with_the_loss(loop):
    steps(loop, lambda output: output.loss + 0.01 * z_loss(output))


def instead_of_the_loss(loop):
    steps(loop, z_loss)


def see_logits(loop, name, output):
    loop.rows(name, output.logits, local_samples(loop.model, {"rows": torch.arange(4)})["rows"])


def logged(loop):
    def read_loss(output):
        see_logits(loop, f"logits {len(loop.losses)}", output)
        return output.loss

    steps(loop, read_loss)


def evaluated(loop):
    loop.step(0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            see_logits(loop, context.__name__, loop.model(**local_samples(loop.model, make_batch(1))))
    loop.step(1)


def differentiated(loop):
    output = loop.model(**local_samples(loop.model, make_batch(0)))
    names, parameters = zip(*loop.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(z_loss(output), parameters)
    loop.seen |= gather_full_tensors(loop.model, dict(zip(names, gradients, strict=True)))
    loop.step(0)


LOOP_PATTERNS = {
    function.__name__: function for function in (with_the_loss, instead_of_the_loss, logged, evaluated, differentiated)
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, tie_word_embeddings=request.param)
    return PatternRuns(folder, LOOP_PATTERNS)


@pytest.mark.filterwarnings("ignore:Full logits are gathered")
@pytest.mark.parametrize(
    ("text", "loop_pattern"),
    [
        *(
            (text, loop_pattern)
            for text in ("tp2+dp2+zero3", "tp2+dp2")
            for loop_pattern in LOOP_PATTERNS
            if loop_pattern != "differentiated"
        ),
        ("tp2", "differentiated"),
    ],
)
def test_equal_to_one_process(runs, text, loop_pattern):
    runs.compare(text, loop_pattern)


@pytest.mark.filterwarnings("ignore:Full logits are gathered")
@pytest.mark.parametrize("text", ["tp2+dp2+zero3", "tp2+dp2"])
def test_gradients_of_logits_by_parameters_are_refused_with_data_parallelism(runs, text):
    runs.refused(text, "differentiated", "torch.autograd.grad with respect to parameters of a data parallel model")
