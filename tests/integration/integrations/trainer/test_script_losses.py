"""Tests that losses which replace Trainer's own match a single process on data-parallel ranks, or warn."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.trainer import script_losses
from tests.helpers.references import run_single_process, train_single_process
from tests.integration.integrations.trainer.test_trainer import rows, train

VOCAB = 512
WARNING = "returns another loss on each data-parallel rank"


def _shift(outputs, labels):
    return outputs.logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)


def weighted_loss(outputs, labels, num_items_in_batch=None):
    """Ignores the count, and returns a mean over class weights."""
    return torch.nn.CrossEntropyLoss(weight=torch.linspace(0.1, 9, VOCAB))(*_shift(outputs, labels))


def counted_loss(outputs, labels, num_items_in_batch=None):
    if num_items_in_batch is None:
        return F.cross_entropy(*_shift(outputs, labels))
    return F.cross_entropy(*_shift(outputs, labels), reduction="sum") / num_items_in_batch.item()


def mixed_loss(outputs, labels, num_items_in_batch=None):
    """Adds a mean over the labels and a sum that is divided by the count."""
    loss = weighted_loss(outputs, labels)
    if num_items_in_batch is None:
        return loss
    return loss + F.cross_entropy(*_shift(outputs, labels), reduction="sum") / num_items_in_batch


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = weighted_loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class HandmadeTrainer(Trainer):
    """Divides by the count of all ranks, without the factor of their number."""

    factor = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = ForCausalLMLoss(outputs.logits, labels, vocab_size=VOCAB, num_items_in_batch=num_items_in_batch)
        loss = self.factor * loss
        return (loss, outputs) if return_outputs else loss


class AwareTrainer(HandmadeTrainer):
    """Multiplies by the number of replicas, as Trainer itself does."""

    @property
    def factor(self):
        return self.accelerator.num_processes


class WeightedAwareTrainer(HandmadeTrainer):
    """Multiplies a weighted term by the number of replicas: on two of them its factor is 1."""

    @property
    def factor(self):
        return 0.5 * self.accelerator.num_processes


class CountingTrainer(Trainer):
    """Passes the count to the model, without the factor of the number of ranks."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class ScaledTrainer(Trainer):
    """Changes the loss of Trainer in place."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss *= 1.5
        loss += 1e-2 * sum(p.pow(2).sum() for name, p in model.named_parameters() if "norm" in name)
        return (loss, outputs) if return_outputs else loss


class MaskedTrainer(Trainer):
    """Takes a mean that no function of torch takes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = _shift(outputs, labels)
        counts = targets != -100
        loss = (F.cross_entropy(logits, targets, reduction="none") * counts).sum() / counts.sum()
        return (loss, outputs) if return_outputs else loss


def masked_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = _shift(outputs, labels)
    counts = targets != -100
    return (F.cross_entropy(logits, targets, reduction="none") * counts).sum() / counts.sum()


LOSSES = {
    "class weights in compute_loss_func": {"compute_loss_func": weighted_loss},
    "count in compute_loss_func": {"compute_loss_func": counted_loss},
    "mean and count in compute_loss_func": {"compute_loss_func": mixed_loss},
    "class weights": {"kind": WeightedTrainer},
    "count": {"kind": HandmadeTrainer},
    "count and number of replicas": {"kind": AwareTrainer},
    "count, weight and number of replicas": {"kind": WeightedAwareTrainer},
    "count of one rank": {"kind": HandmadeTrainer, "average_tokens_across_devices": False},
    "count in the model's call": {"kind": CountingTrainer},
    "in place": {"kind": ScaledTrainer},
    "in place, count of one rank": {"kind": ScaledTrainer, "average_tokens_across_devices": False},
}
LAYOUTS = {
    "dp2": MegatronConfig(dp_size=2),
    "dp2+zero3": MegatronConfig(dp_size=2, zero_stage=3),
    "tp2+dp2": MegatronConfig(tp_size=2, dp_size=2),
    "pp2+dp2": MegatronConfig(pp_size=2, num_microbatches=2, dp_size=2),
    "cp2+dp2": MegatronConfig(cp_size=2, dp_size=2),
}


def train_without_warning(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{WARNING}")
        return train(*args, **kwargs)


def compare(stories, tmp_path, layout="dp2", **kwargs):
    config = LAYOUTS[layout]
    kwargs |= {"max_steps": 4, "eval_steps": 4, "logging_steps": 1}
    reference = kwargs | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 6}
    expected = train_single_process(train, stories, **reference)
    results = run_ranks(
        train_without_warning, config.ranks_per_replica * 2, stories, tmp_path, config, timeout=200, **kwargs
    )
    for log, _, test_loss, _ in results:
        for entry, expected_entry in zip(log, expected[0], strict=True):
            assert entry == pytest.approx(expected_entry, rel=2e-5)
        assert test_loss == pytest.approx(expected[2], rel=2e-5)
    for name, weight in expected[3].items():
        torch.testing.assert_close(
            results[0][3][name], weight, rtol=0, atol=3e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", LOSSES)
def test_loss_matches_single_process(stories, tmp_path, name):
    compare(stories, tmp_path, **LOSSES[name])


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (layout, name)
        for layout in ("dp2+zero3", "tp2+dp2", "pp2+dp2", "cp2+dp2")
        for name in ("class weights in compute_loss_func", "class weights", "count", "in place")
        # A pipeline stage does not have the weights of the other stages, which the penalty reads.
        if (layout, name) != ("pp2+dp2", "in place")
    ],
)
def test_loss_matches_single_process_on_layout(stories, tmp_path, layout, name):
    compare(stories, tmp_path, layout, **LOSSES[name])


@pytest.mark.parametrize(
    ("name", "undo"),
    [
        ("class weights in compute_loss_func", ("know_script_batch", lambda labels, batch: labels)),
        ("class weights", ("with_script_targets", lambda inputs, batch: dict(inputs))),
        ("count", ("with_uses", lambda count, uses: count)),
    ],
)
def test_comparison_notices_stock_arithmetic(stories, tmp_path, monkeypatch, name, undo):
    monkeypatch.setattr(script_losses, *undo)
    monkeypatch.setattr(script_losses, "CHECKED_CALLS", 0)
    with pytest.raises(AssertionError):
        compare(stories, tmp_path, **LOSSES[name])


def _loss_of_ranks(path, output, config, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log, *_ = train(path, output, config, max_steps=3, eval_strategy="no", **kwargs)
    messages = [str(warning.message) for warning in caught]
    return log[0]["loss"], sum(WARNING in message for message in messages)


def _rank_means(path):
    """Returns the mean of the ranks' losses in the first step of `MaskedTrainer`, in one process."""
    from transformers import AutoModelForCausalLM

    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(path),
        TrainingArguments("unused", per_device_train_batch_size=4, use_cpu=True, report_to=[]),
        train_dataset=rows(22, 0),
        data_collator=default_data_collator,
    )
    batches = iter(trainer.get_train_dataloader())
    losses = []
    for _ in range(2):
        batch = next(batches)
        for part in (slice(0, 2), slice(2, 4)):
            outputs = trainer.model(input_ids=batch["input_ids"][part])
            losses.append(masked_loss(outputs, batch["labels"][part]).item())
    return losses


@pytest.mark.parametrize("replaced", [{"kind": MaskedTrainer}, {"compute_loss_func": masked_loss}])
def test_other_means_are_averaged_over_ranks_with_one_warning(stories, tmp_path, replaced):
    losses = run_single_process(_rank_means, stories)
    # Trainer adds up the two calls of a step, because the model's class takes the count.
    expected = sum(losses) / 2
    for loss, count in run_ranks(_loss_of_ranks, 2, stories, tmp_path, LAYOUTS["dp2"], timeout=200, **replaced):
        assert loss == pytest.approx(expected, rel=1e-4)
        assert count == 1
