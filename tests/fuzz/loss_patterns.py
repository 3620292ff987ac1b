"""Training-loop patterns on model inputs and on the loss before `backward`."""

import torch
from torch import Tensor, nn

from tests.fuzz.loop import Loop
from tests.fuzz.pattern import LoopPattern


def _scale_loss(loop: Loop, loss: Tensor) -> None:
    (loss / 4).backward()


def _regularize(loop: Loop, loss: Tensor) -> None:
    # Each stage adds its own parameters: the sum covers all parameters on every layout.
    square = sum((parameter.float() ** 2).sum() for parameter in loop.model.parameters())
    (loss + 1e-3 * loop.case["norm"] * square).backward()


def _regularize_and_scale(loop: Loop, loss: Tensor) -> None:
    square = sum((parameter.float() ** 2).sum() for parameter in loop.model.parameters())
    ((loss + 1e-3 * loop.case["norm"] * square) / 4).backward()


def _square_loss(loop: Loop, loss: Tensor) -> None:
    (loss**2 / 2).backward()


def _sum_two_forwards(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    other = {name: value.flip(-1) if name == "input_ids" else value for name, value in batch.items()}
    return loop.model(**batch).loss + 0.5 * loop.model(**other).loss


def _evaluate_before_backward(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    loss = loop.model(**batch).loss
    loop.log("evaluated", loop.evaluate())
    return loss


def _log_evaluation(loop: Loop) -> None:
    loop.log("evaluated", loop.evaluate())


def _discard_first_loss(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    loop.model(**batch)
    return loop.model(**batch).loss


def _train_inputs(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    batch = dict(batch)
    embeds = loop.model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    loop.kept["embeds"] = embeds
    return loop.model(inputs_embeds=embeds, **batch).loss


def _log_input_gradients(loop: Loop) -> None:
    loop.log("squares of the inputs' gradient", loop.total(loop.kept["embeds"].grad.pow(2).sum()))


def _make_prompt(loop: Loop) -> None:
    generator = torch.Generator().manual_seed(5)
    width = loop.model.config.get_text_config().hidden_size
    loop.kept["prompt"] = nn.Parameter(0.3 * torch.randn(3, width, generator=generator))


def _prepend_prompt(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    prompt, batch_size = loop.kept["prompt"], len(batch["input_ids"])
    embeds = loop.model.get_input_embeddings()(batch["input_ids"])
    embeds = torch.cat([prompt.expand(batch_size, -1, -1), embeds], 1)
    attention_mask = torch.cat([torch.ones(batch_size, 3, dtype=torch.long), batch["attention_mask"]], 1)
    labels = torch.cat([torch.full((batch_size, 3), -100), batch["labels"]], 1)
    return loop.model(inputs_embeds=embeds, attention_mask=attention_mask, labels=labels).loss


def _step_prompt(loop: Loop) -> None:
    prompt = loop.kept["prompt"]
    gradient = loop.total(prompt.grad) / loop.dp_size
    loop.log("norm of the prompt's gradient", gradient.norm())
    with torch.no_grad():
        prompt -= gradient / loop.case["norm"]
    prompt.grad = None


def _smooth_labels(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    return loop.model(**batch, label_smoothing=0.3).loss


def _count_items(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    count = loop.total((batch["labels"][:, 1:] != -100).sum()).long()
    # Local losses must sum to the global one while gradients are averaged: multiply by dp_size, as Trainer does.
    return loop.model(**batch, num_items_in_batch=count).loss * loop.dp_size


def _set_label_outside(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[-1, labels.shape[1] // 2] = loop.case["config"]["vocab_size"]
    return loop.model(**{**batch, "labels": labels}).loss


def _set_negative_label(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[-1, labels.shape[1] // 2] = -1
    return loop.model(**{**batch, "labels": labels}).loss


def _set_token_outside(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"].clone()
    ids[-1, -1] = loop.case["config"]["vocab_size"]
    return loop.model(**{**batch, "input_ids": ids}).loss


def _compute_external_loss(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    batch = dict(batch)
    labels = batch.pop("labels")
    logits = loop.model(**batch).logits[:, :-1]
    # The local sum over the global number of targets, times dp_size since gradients are averaged over dp ranks.
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    count = loop.total((labels[:, 1:] != -100).sum().float())
    return losses * loop.dp_size / count


def _return_tuple(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    return loop.model(**batch, return_dict=False)[0]


def _pack_documents(loop: Loop, batch: dict[str, Tensor], **more: bool) -> Tensor:
    length = batch["input_ids"].shape[1]
    first = length // 2
    places = torch.cat([torch.arange(first), torch.arange(length - first)])
    positions = places.expand(len(batch["input_ids"]), -1).contiguous()
    labels = batch["labels"].masked_fill(positions == 0, -100)
    return loop.model(input_ids=batch["input_ids"], position_ids=positions, labels=labels, **more).loss


def _evaluate_packed(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.log("eval loss of packed rows", _pack_documents(loop, loop.batches[0][0]))
    loop.model.train()


def _pack_without_cache(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    return _pack_documents(loop, batch, use_cache=False)


def _log_loss_around_backward(loop: Loop, loss: Tensor) -> None:
    loop.log_loss("loss read after backward", loss.detach() + 0)
    loss.backward()
    loop.log_loss("loss read after backward", loss.detach() + 0)


_ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}

LOSS_PATTERNS = (
    LoopPattern("loss scaled", "`(loss / 4).backward()`", backward=_scale_loss),
    LoopPattern("loss squared", "a function of the loss", backward=_square_loss, of_full=True),
    LoopPattern("regularised", "the loss and a sum of squares of all parameters", backward=_regularize),
    LoopPattern("regularised and scaled", "the same, divided by 4", backward=_regularize_and_scale),
    LoopPattern("two forwards", "backward of the sum of two calls' losses", forward=_sum_two_forwards),
    LoopPattern(
        "loss thrown away", "a training call without backward before the one that counts", forward=_discard_first_loss
    ),
    LoopPattern("evaluated between", "an evaluation between forward and backward", forward=_evaluate_before_backward),
    LoopPattern("evaluated after steps", "evaluation after each step", after_step=_log_evaluation, acts=1),
    LoopPattern("loss read", "the loss read before and after backward", backward=_log_loss_around_backward),
    LoopPattern(
        "inputs trained",
        "`inputs_embeds` that require a gradient",
        forward=_train_inputs,
        before_step=_log_input_gradients,
        needs=("causal", "decoder"),
    ),
    LoopPattern(
        "soft prompt",
        "a trained prompt in front of the embeddings, a graph behind both",
        made=_make_prompt,
        forward=_prepend_prompt,
        before_step=_step_prompt,
        needs=("causal", "decoder"),
    ),
    LoopPattern(
        "label smoothing", "`model(..., label_smoothing=0.3)`", forward=_smooth_labels, needs=("causal", "kwargs")
    ),
    LoopPattern(
        "items counted",
        "`num_items_in_batch` of all ranks, times the ranks",
        forward=_count_items,
        needs=("causal", "kwargs"),
        local=True,
    ),
    LoopPattern("label outside", "a label that is no token", forward=_set_label_outside, needs=("causal",)),
    LoopPattern("label of -1", "a label below the vocabulary", forward=_set_negative_label, needs=("causal",)),
    LoopPattern("token outside", "a token the embedding does not have", forward=_set_token_outside),
    LoopPattern(
        "own loss",
        "a loss of one's own from `outputs.logits`",
        forward=_compute_external_loss,
        needs=("causal",),
        local=True,
    ),
    LoopPattern("tuple outputs", "`return_dict=False`", forward=_return_tuple),
    LoopPattern(
        "packed",
        "documents told apart by `position_ids`, while the config asks for a cache",
        forward=_pack_documents,
        needs=("causal", "positions"),
    ),
    LoopPattern(
        "packed without cache",
        "the same with `use_cache=False`",
        forward=_pack_without_cache,
        needs=("causal", "positions"),
    ),
    LoopPattern(
        "packed evaluation",
        "the same in evaluation, while the config asks for a cache",
        made=_evaluate_packed,
        needs=("causal", "positions"),
    ),
    LoopPattern("router loss", "`output_router_logits=True`", changes=_ROUTER_LOSS, needs=("experts",)),
)
