"""Tests that the logs, predictions and weights of a stock Trainer match a single process."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from tests.helpers.references import train_single_process

TP2_SP = MegatronConfig(tp_size=2, sequence_parallel=True)


def rows(count, seed, length=33):
    """Returns random samples with unequal numbers of labels; the second has none."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(count):
        ids = torch.randint(3, 512, (length,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, 30, (1,), generator=generator))] = -100
        if index == 1:
            labels[:] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "samples": len(prediction.predictions)}


class OwnLoss(Trainer):
    """Overrides `compute_loss` without changing it, as many trainers that add logging do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def train(
    path, output, config, compute_loss_func=None, prepare=None, train_rows=22, eval_rows=7, kind=Trainer, **arguments
):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    if prepare is not None:
        prepare(model)
    defaults = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
    }
    trainer = kind(
        model,
        TrainingArguments(str(output), **(defaults | arguments)),
        train_dataset=rows(train_rows, 0),
        eval_dataset=rows(eval_rows, 1),
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    prediction = trainer.predict(rows(6, 2))
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    names = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "eval_samples", "epoch", "train_loss")
    names += ("num_input_tokens_seen",)
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    return log, prediction.predictions, prediction.metrics["test_loss"], weights


def compare(stories, tmp_path, layout=TP2_SP, tolerance=2e-5, timeout=200, **kwargs):
    dp_size = layout.dp_size or 1
    one = kwargs | {"per_device_train_batch_size": 2 * dp_size, "per_device_eval_batch_size": 3 * dp_size}
    expected = train_single_process(train, stories, **one)
    results = run_ranks(train, layout.ranks_per_replica * dp_size, stories, tmp_path, layout, timeout=timeout, **kwargs)
    assert len(expected[0]) >= 6
    for log, predictions, test_loss, _ in results:
        assert len(log) == len(expected[0])
        for entry, reference in zip(log, expected[0], strict=True):
            assert entry == pytest.approx(reference, rel=tolerance)
        np.testing.assert_allclose(predictions, expected[1], atol=1e-3)
        assert test_loss == pytest.approx(expected[2], rel=tolerance)
    for name, weight in expected[3].items():
        torch.testing.assert_close(
            results[0][3][name], weight, rtol=0, atol=3e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_train_evaluate_predict_with_accumulation_and_clipping(stories, tmp_path):
    compare(stories, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        MegatronConfig(dp_size=2),
        MegatronConfig(dp_size=2, zero_stage=0),
        MegatronConfig(tp_size=2, sequence_parallel=True, dp_size=2, zero_stage=2),
        MegatronConfig(tp_size=2, dp_size=2, zero_stage=3),
    ],
    ids=lambda config: config.layout(),
)
def test_data_parallel(stories, tmp_path, layout):
    compare(stories, tmp_path, layout)


class CompilingTrainer(Trainer):
    """Checks after training that layers were compiled, and that the graph of the complete model was not."""

    def train(self, *args, **kwargs):
        from torch._dynamo.utils import counters

        counters.clear()
        result = super().train(*args, **kwargs)
        assert counters["stats"]["unique_graphs"] > 0
        if parallel_state(self.model) is not None:
            assert not counters["graph_break"] and self.model is self.model_wrapped
            assert all(layer._compiled_call_impl is not None for layer in self.model.model.layers if layer.training)
        return result


@pytest.mark.parametrize(
    "layout",
    [TP2_SP, MegatronConfig(pp_size=2), MegatronConfig(dp_size=2)],
    ids=lambda config: config.layout(),
)
def test_torch_compile_compiles_layers(stories, tmp_path, layout):
    compile = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compare(stories, tmp_path, layout, kind=CompilingTrainer, max_steps=3, timeout=600, **compile)


@pytest.mark.parametrize(
    "layout",
    [
        MegatronConfig(dp_size=2, zero_stage=3, loss_chunk_size=7),
        MegatronConfig(pp_size=2, num_microbatches=2, loss_chunk_size=7),
    ],
    ids=lambda config: config.layout(),
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_in_chunks(stories, tmp_path, layout, smoothing):
    """With label smoothing Trainer computes the loss from full logits."""
    compare(stories, tmp_path, layout, label_smoothing_factor=smoothing, max_steps=3)


def test_custom_compute_loss_with_unlogged_steps(stories, tmp_path):
    """The last batch of an epoch is not full, and the mean training loss includes steps after the last log."""
    compare(stories, tmp_path, MegatronConfig(dp_size=2), kind=OwnLoss, logging_steps=4, eval_steps=1)


def test_without_averaging_tokens_across_devices(stories, tmp_path):
    compare(stories, tmp_path, average_tokens_across_devices=False, include_num_input_tokens_seen="all", max_steps=3)


def test_label_smoothing(stories, tmp_path):
    compare(stories, tmp_path, label_smoothing_factor=0.1, max_steps=3)


def mean_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].reshape(-1, 512)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum")
    return loss / num_items_in_batch if num_items_in_batch is not None else loss / 100


def test_compute_loss_func_sees_full_logits(stories, tmp_path):
    compare(stories, tmp_path, compute_loss_func=mean_loss, max_steps=3)


def test_gradient_checkpointing(stories, tmp_path):
    compare(stories, tmp_path, gradient_checkpointing=True, max_steps=3)
    compare(
        stories,
        tmp_path,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
        max_steps=3,
    )


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)


def test_frozen_parameters(stories, tmp_path):
    compare(stories, tmp_path, prepare=freeze, max_steps=3)


def test_load_best_model_at_end(stories, tmp_path):
    compare(
        stories,
        tmp_path,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,
        load_best_model_at_end=True,
        # This metric is constant: the first checkpoint stays the best and is loaded at the end.
        metric_for_best_model="samples",
    )


def test_fsdp_and_deepspeed_are_rejected(stories, tmp_path):
    from hf_megatron import UnsupportedError

    def build():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=MegatronConfig(tp_size=2))
        arguments = TrainingArguments(str(tmp_path), use_cpu=True)
        for name in ("fsdp", "deepspeed"):
            setattr(arguments, name, {"stage": 3})  # any true value
            with pytest.raises(UnsupportedError, match=name):
                Trainer(model, arguments)
            setattr(arguments, name, None)

    run_ranks(build, 2)
