"""Stock SFTTrainer and DPOTrainer on every axis against the same trainer in one process, and losses of one's own."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset, load_from_disk
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_megatron.checkpoint.merged import full_state_dict
from hf_megatron.integrations.verified import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel.transport import Transport
from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.ranks import run_ranks

from .dp_training import ranks_of

LAYOUTS = ["tp2", "pp2", "dp2", "tp2+sp+pp2", "pp2+dp2"]
DEFAULTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "bf16": False,
    "gradient_checkpointing": False,
}
ANIMALS, PLACES = ("cat", "dog", "bird", "big bear", "frog"), ("park", "old house", "garden", "wood by the sea")
UNEQUAL = ("runtime", "per_second", "flos")


def layout(text):
    [config] = parse_layouts(text)
    return ConfigUnderTest(**config.to_dict())


def preferences(count, seed=0):
    """Prompts with a better and a worse end, of unequal lengths."""
    found = []
    for number in range(seed, seed + count):
        animal, place = ANIMALS[number % 5], PLACES[number % 4]
        chosen = f" It was happy and ran to the {PLACES[(number + 1) % 4]}." + " They played." * (number % 3)
        prompt = f"Once upon a time a {animal} lived in the {place}."
        found.append({"prompt": prompt, "chosen": chosen, "rejected": f" The {animal} {place} {place}."})
    return found


def completions(count, seed=0):
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in preferences(count, seed)]


def texts(count, seed=0):
    return [{"text": row["prompt"] + row["chosen"]} for row in preferences(count, seed)]


def on_disk(dataset, directory):
    if dist.get_rank() == 0:
        dataset.save_to_disk(directory)
    dist.barrier()
    return load_from_disk(directory)


def train(path, output, config, trainer_class, samples, prepare=None, by_name=False, **kwargs):
    """Everything the trainer logs, the trained weights, and the most numbers one broadcast over stages had."""
    dp_size = 1 if config is None else config.dp_size or 1
    shapes = [()]
    original = Transport.broadcast

    def broadcast(self, tensors, source):
        tensors = original(self, tensors, source)
        shapes.extend(tuple(tensor.shape) for tensor in tensors)
        return tensors

    Transport.broadcast = broadcast
    sizes = {name: DEFAULTS[name] // dp_size for name in DEFAULTS if name.startswith("per_device")}
    config_class = SFTConfig if trainer_class is SFTTrainer else DPOConfig
    if by_name:
        kwargs["model_init_kwargs"] = {} if config is None else {"megatron_config": config}
        model = str(path)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
        if prepare is not None:
            prepare(model)
    extra = {name: kwargs.pop(name) for name in ("compute_metrics", "compute_loss_func") if name in kwargs}
    if "ref_model" in kwargs:
        extra["ref_model"] = kwargs.pop("ref_model")(path, config)
    datasets = [Dataset.from_list(samples(8)), Dataset.from_list(samples(4, 3))]
    if kwargs.get("precompute_ref_log_probs"):
        # Ranks read what the first one computed from beside a dataset's file.
        datasets = [on_disk(dataset, output / name) for dataset, name in zip(datasets, ("train", "eval"), strict=True)]
    trainer = trainer_class(
        model=model,
        args=config_class(str(output), **(DEFAULTS | sizes | kwargs)),
        train_dataset=datasets[0],
        eval_dataset=datasets[1],
        **extra,
    )
    trainer.train()
    log = [
        {name: value for name, value in entry.items() if not any(part in name for part in UNEQUAL)}
        for entry in trainer.state.log_history
    ]
    model = trainer.model
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    return log, weights, shapes


@functools.cache
def reference(path, output, trainer_class, samples, options):
    [found] = run_ranks(train, 1, path, output, None, trainer_class, samples, timeout=200, **dict(options))
    return found


def compare(stories, tmp_path, text, trainer_class, samples, tolerance=2e-5, **kwargs):
    config = layout(text) if isinstance(text, str) else text
    options = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in kwargs.items())
    expected = reference(stories, tmp_path.parent / "one", trainer_class, samples, options)
    found = run_ranks(train, ranks_of(config), stories, tmp_path, config, trainer_class, samples, timeout=200, **kwargs)
    assert len(expected[0]) >= 4
    for log, _, _ in found:
        assert log == found[0][0], "every rank logs the same"
        assert len(log) == len(expected[0])
        for entry, other in zip(log, expected[0], strict=True):
            # Over several dp ranks Trainer reports the mean of their means.
            if config.dp_size and "eval_loss" in entry:
                entry, other = ({**numbers, "eval_loss": 0.0} for numbers in (entry, other))
            assert entry == pytest.approx(other, rel=tolerance, abs=1e-5)
    for name, weight in expected[1].items():
        torch.testing.assert_close(
            found[0][1][name], weight, rtol=0, atol=3e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
    return [shape for _, _, shapes in found for shape in shapes]


@pytest.mark.parametrize("text", LAYOUTS)
def test_sft(stories, tmp_path, text):
    shapes = compare(stories, tmp_path, text, SFTTrainer, completions)
    assert ("pp" in text) == (len(shapes) > 50)
    assert all(len(shape) <= 2 for shape in shapes), "nothing of vocabulary size travels"


@pytest.mark.parametrize("text", LAYOUTS)
def test_dpo(stories, tmp_path, text):
    shapes = compare(stories, tmp_path, text, DPOTrainer, preferences)
    assert ("pp" in text) == (len(shapes) > 50)
    assert all(len(shape) <= 2 for shape in shapes), "nothing of vocabulary size travels"


def count_right(prediction):
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"right": float(right.mean())}


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].reshape(-1, 512)
    return F.cross_entropy(logits, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@torch.no_grad()
def laid_out_reference(path, config):
    """Another model than the policy: of equal ones the better reward is a matter of rounding."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    for parameter in model.parameters():
        parameter.mul_(0.98)
    return model


def whole_reference(path, config):
    return laid_out_reference(path, None)


@pytest.mark.parametrize(
    ("text", "trainer_class", "samples", "options"),
    [
        ("pp2", SFTTrainer, texts, {"loss_type": "dft"}),
        ("tp2", SFTTrainer, texts, {"loss_type": "dft"}),
        ("pp2", SFTTrainer, texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 32}),
        ("pp2", SFTTrainer, texts, {"packing": True, "max_length": 64}),
        ("tp2", SFTTrainer, texts, {"packing": True, "max_length": 64}),
        ("pp2", SFTTrainer, completions, {"completion_only_loss": False, "gradient_checkpointing": True}),
        ("pp2", SFTTrainer, completions, {"label_smoothing_factor": 0.1}),
        ("pp2", SFTTrainer, completions, {"compute_loss_func": own_loss}),
        ("pp2", SFTTrainer, completions, {"compute_metrics": count_right}),
        ("pp2", SFTTrainer, completions, {"by_name": True}),
        ("tp2", SFTTrainer, completions, {"average_tokens_across_devices": False}),
        ("pp2", DPOTrainer, preferences, {"loss_type": ("ipo", "robust", "sft"), "label_smoothing": 0.1}),
        ("tp2", DPOTrainer, preferences, {"use_weighting": True, "ld_alpha": 0.5, "gradient_checkpointing": True}),
        ("pp2", DPOTrainer, preferences, {"use_weighting": True, "ld_alpha": 0.5, "gradient_checkpointing": True}),
        ("tp2+pp2", DPOTrainer, preferences, {"precompute_ref_log_probs": True}),
        ("pp2+dp2", DPOTrainer, preferences, {"precompute_ref_log_probs": True}),
        ("pp2", DPOTrainer, preferences, {"compute_metrics": count_right}),
        ("pp2", DPOTrainer, preferences, {"by_name": True}),
        ("pp2", DPOTrainer, preferences, {"ref_model": whole_reference}),
        ("tp2", DPOTrainer, preferences, {"ref_model": laid_out_reference}),
    ],
)
def test_options(stories, tmp_path, text, trainer_class, samples, options):
    compare(stories, tmp_path, text, trainer_class, samples, max_steps=2, eval_steps=2, **options)
