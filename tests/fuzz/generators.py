"""Random models and batches of a case, drawn from its seed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.fuzz.pattern import LoopPattern


def make_config(case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern]) -> Any:
    """Returns the config of a case's model, changed by its loop patterns."""
    changes = {name: value for loop_pattern in loop_patterns for name, value in loop_pattern.changes.items()}
    return transformers.AutoConfig.for_model(case["type"], **{**case["config"], **changes})


def draw_model(case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern], folder: str) -> None:
    """Saves a model with random weights, including norms and biases."""
    torch.manual_seed(case["seed"])
    config = make_config(case, loop_patterns)
    model = getattr(transformers, case["class"]).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() < 2:
                parameter.copy_(0.1 * noise + (1.0 if parameter.mean() > 0.5 else 0.0))
            else:
                embeds = "embed" in name or "wte" in name or "wpe" in name or "shared" in name
                parameter.copy_(noise * (0.3 if embeds else 0.8 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(folder)


def draw_batches(case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern]) -> list[list[dict[str, Tensor]]]:
    """Draws the global microbatches of each step: `input_ids`, `attention_mask` and `labels` of `[batch, length]`."""
    batch_config = {
        **case["batch"],
        **{name: value for loop_pattern in loop_patterns for name, value in loop_pattern.batch.items()},
    }
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    steps = []
    for step in range(batch_config["steps"]):
        count = batch_config["accumulation"]
        batch_sizes = [batch_config["rows"] + (2 * index if batch_config["uneven"] else 0) for index in range(count)]
        if step == batch_config["steps"] - 1:
            batch_sizes[-1] = batch_config["last_rows"] or batch_sizes[-1]
        steps.append([_draw_batch(case, batch_config, batch_size, generator) for batch_size in batch_sizes])
    return steps


def _draw_batch(case: Mapping[str, Any], wanted: Mapping[str, Any], rows: int, generator: torch.Generator) -> dict:
    length = wanted["length"]
    ids = torch.randint(3, case["config"]["vocab_size"], (rows, length), generator=generator)
    attention_mask = torch.ones_like(ids)
    if wanted["padding"] != "none":
        padding = length // 3
        attention_mask[-1, slice(0, padding) if wanted["padding"] == "left" else slice(length - padding, None)] = 0
        ids[attention_mask == 0] = 0
    batch = {"input_ids": ids, "attention_mask": attention_mask}
    if case["task"] == "classification":
        return batch | {"labels": torch.randint(3, (rows,), generator=generator)}
    labels = ids.clone()
    if case["task"] == "seq2seq":
        labels = torch.randint(3, case["config"]["vocab_size"], (rows, length - 2), generator=generator)
    elif case["task"] == "tokens":
        labels = torch.randint(3, (rows, length), generator=generator)
    ignored = torch.rand(labels.shape, generator=generator) < (0.6 if case["task"] == "masked" else 0.1)
    if wanted["mask"] == "half":
        ignored[: rows // 2] = True
    elif wanted["mask"] == "rows":
        ignored[::2] = True
    elif wanted["mask"] == "borders":
        ignored[:, :2] = ignored[:, -2:] = True
    elif wanted["mask"] == "none":
        ignored[:] = False
    # Keep some labels: the mean over none is NaN in a single process too.
    ignored[-1, length // 2 : length // 2 + 2] = False
    if case["task"] != "seq2seq":
        ignored |= attention_mask == 0
    return batch | {"labels": labels.masked_fill(ignored, -100)}
