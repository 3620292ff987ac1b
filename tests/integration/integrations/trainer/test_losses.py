"""Tests of stock Trainer with heads that compute their own loss, on parallel layouts against a single process."""

import pytest
import torch
import transformers
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.references import run_single_process
from tests.parity.losses.test_losses import _CONFIGS, HEADS, _make_layout, batch


def _make_samples(head, count, seed):
    samples = batch(head, seed, rows=count)
    return [{name: values[index] for name, values in samples.items()} for index in range(count)]


class Penalized(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-2 * sum(p.pow(2).sum() for name, p in model.named_parameters() if "proj" in name)
        return (loss, outputs) if return_outputs else loss


def train(family, head, output, layout, accepts_count=True, trainer_class=Trainer, rows=(22, 10), **arguments):
    suffix, changes = HEADS[head]
    torch.manual_seed(0)
    config = None if layout is None else _make_layout(layout)
    path = output / f"{family}-{head}"
    cls = getattr(transformers, f"{family}{suffix}")
    if layout is None:
        cls(_CONFIGS[family](**changes)).save_pretrained(path)
    model = cls.from_pretrained(path, megatron_config=config)
    if not accepts_count:
        model.accepts_loss_kwargs = False
    ranks = 1 if config is None else config.dp_size or 1
    defaults = {
        "per_device_train_batch_size": 4 // ranks,
        "per_device_eval_batch_size": 6 // ranks,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        # Keeps updates by gradients that are zero in exact arithmetic negligible.
        "adam_epsilon": 1e-4,
    }
    trainer = trainer_class(
        model,
        TrainingArguments(str(output / "out"), **(defaults | arguments)),
        # Only one rank has samples of the last batch.
        train_dataset=_make_samples(head, rows[0], 0),
        eval_dataset=_make_samples(head, rows[1], 1),
        data_collator=default_data_collator,
    )
    trainer.train()
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    names = ("loss", "grad_norm", "eval_loss", "total_flos")
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    return log, {name: weight.clone() for name, weight in weights.items()}


def compare(family, head, folder, layout="dp2", **arguments):
    log, weights = run_single_process(train, family, head, folder, None, **arguments)
    assert len(log) >= 5
    config = _make_layout(layout)
    results = run_ranks(
        train, config.ranks_per_replica * (config.dp_size or 1), family, head, folder, layout, timeout=200, **arguments
    )
    for other, _ in results:
        for entry, reference in zip(other, log, strict=True):
            assert entry == pytest.approx(reference, rel=2e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(
            results[0][1][name], weight, rtol=0, atol=3e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *(("Bert", head) for head in ("masked", "single", "tokens", "answers")),
        *(("Llama", head) for head in ("single", "tokens", "answers", "regression")),
        ("T5", "seq2seq"),
    ],
)
def test_logs_match_single_process(folder, family, head):
    compare(family, head, folder)


@pytest.mark.parametrize("layout", ["tp2", "dp2+zero3"])
def test_weight_penalty_in_compute_loss(folder, layout):
    # Sizes fill the last batch: a custom loss would also count its repeated samples.
    compare("Llama", "single", folder, layout, trainer_class=Penalized, rows=(24, 12))


@pytest.mark.parametrize(
    ("family", "head", "layout"),
    [
        *(("Llama", head, "tp2") for head in ("single", "tokens", "answers", "regression")),
        *(("Llama", head, "pp2") for head in ("single", "tokens", "answers", "regression")),
        *(("Llama", head, "pp2+dp2") for head in ("tokens", "answers", "regression")),
        ("GPT2", "tokens", "pp2+dp2"),
        ("Bert", "masked", "pp2"),
    ],
)
def test_model_parallel_logs_match_single_process(folder, family, head, layout):
    compare(family, head, folder, layout)


@pytest.mark.parametrize("layout", ["tp2", "tp2+sp", "pp2", "dp2"])
@pytest.mark.parametrize("head", ["regression", "tokens", "answers"])
def test_twenty_steps(folder, head, layout):
    compare("Llama", head, folder, layout, max_steps=20, eval_steps=10)


SMOOTHED = [
    *(("Llama", "causal", layout) for layout in ("dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "tp2", "pp2")),
    *(("Bert", "masked", layout) for layout in ("dp2", "dp2+zero3")),
]


@pytest.mark.parametrize(("family", "head", "layout"), SMOOTHED)
def test_label_smoothing_factor(folder, family, head, layout):
    compare(family, head, folder, layout, label_smoothing_factor=0.1)


@pytest.mark.parametrize("arguments", [{}, {"label_smoothing_factor": 0.1}], ids=["plain", "smoothed"])
def test_model_without_num_items_in_batch(folder, arguments):
    compare("Llama", "causal", folder, accepts_count=False, **arguments)


def test_average_tokens_across_devices_is_ignored(folder):
    compare("Llama", "causal", folder, average_tokens_across_devices=False)


def test_router_loss_with_num_items_in_batch(folder):
    """Trainer multiplies both losses by the number of ranks."""
    compare("Mixtral", "causal", folder)


def test_unscaled_rank_loss_is_detected(folder, monkeypatch):
    """Seeded fault: the loss is not divided by the number of ranks, by which Trainer multiplies it."""
    monkeypatch.setattr("hf_megatron.losses.inline_losses.with_loss", lambda output, loss: output)
    with pytest.raises(AssertionError):
        compare("Bert", "masked", folder)
