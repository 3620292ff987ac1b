"""Training-loop patterns on weights, optimizers and random numbers."""

import copy
import gc

import torch
from torch import Tensor, nn

from tests.fuzz.loop import Loop
from tests.fuzz.pattern import LoopPattern


@torch.no_grad()
def _scale_weights(loop: Loop) -> None:
    if loop.steps == 1:
        for parameter in loop.model.parameters():
            parameter.mul_(0.5)


def _scale_data(loop: Loop) -> None:
    if loop.steps == 1:
        for parameter in loop.model.parameters():
            parameter.data = parameter.data * 0.5


def _copy_data(loop: Loop) -> None:
    if loop.steps == 1:
        for parameter in loop.model.parameters():
            parameter.data.copy_(parameter.data * 0.5)


@torch.no_grad()
def _edit_rows(loop: Loop) -> None:
    for weight in loop.vocabulary():
        weight[5].zero_()
        weight[6] = 0.25
        weight.data[7:9].mul_(0.5)


def _redraw_vocabulary(loop: Loop) -> None:
    if loop.steps == 1:
        for weight in loop.vocabulary():
            # Reseeded per weight, since a pipeline stage may hold only one of them.
            torch.manual_seed(3)
            nn.init.normal_(weight, std=0.2)


def _get_first_layer(loop: Loop) -> nn.Module:
    return next(module for module in loop.model.modules() if isinstance(module, nn.ModuleList))[0]


def _save_layer(loop: Loop) -> None:
    loop.kept["part"] = {name: value.clone() for name, value in _get_first_layer(loop).state_dict().items()}


def _load_layer(loop: Loop) -> None:
    if loop.steps == 1:
        _get_first_layer(loop).load_state_dict(loop.kept["part"])


def _save_all(loop: Loop) -> None:
    loop.kept["all"] = {name: value.clone() for name, value in loop.model.state_dict().items()}


def _load_all(loop: Loop) -> None:
    if loop.steps == 1:
        loop.model.load_state_dict(loop.kept["all"])


def _reload_optimizer(loop: Loop) -> None:
    if loop.steps == 1:
        loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def _start_average(loop: Loop) -> None:
    loop.kept["average"] = {name: p.detach().clone() for name, p in loop.model.named_parameters()}


@torch.no_grad()
def _swap_average(loop: Loop) -> None:
    average, weights = loop.kept["average"], {}
    for name, parameter in loop.model.named_parameters():
        average[name].lerp_(parameter.detach(), 0.3)
        weights[name] = parameter.detach().clone()
        parameter.copy_(average[name])
    loop.log("averaged weights evaluated", loop.evaluate())
    for name, parameter in loop.model.named_parameters():
        parameter.copy_(weights[name])


@torch.no_grad()
def _swap_average_for_good(loop: Loop) -> None:
    average = loop.kept["average"]
    for name, parameter in loop.model.named_parameters():
        average[name].lerp_(parameter.detach(), 0.3)
        if loop.steps == 2:
            parameter.data.copy_(average[name])


def _copy_model(loop: Loop) -> None:
    loop.kept["copy"] = copy.deepcopy(loop.model).requires_grad_(False)


@torch.no_grad()
def _average_into_copy(loop: Loop) -> None:
    for mean, parameter in zip(loop.kept["copy"].parameters(), loop.model.parameters(), strict=True):
        mean.lerp_(parameter, 0.3)
    copied = loop.kept["copy"].eval()
    loop.log("copy evaluated", copied(**loop.batches[0][0]).loss)


def _cast_to_double(loop: Loop) -> None:
    loop.model.double()


def _cast_to_double_later(loop: Loop) -> None:
    if loop.steps == 1:
        loop.model.to(torch.float64)


def _cast_to_bfloat16(loop: Loop) -> None:
    loop.model.to(torch.bfloat16)


def _log_num_parameters(loop: Loop) -> None:
    loop.log("num_parameters", loop.model.num_parameters())
    loop.log("trainable", loop.model.num_parameters(only_trainable=True))


def _log_state_dict_size(loop: Loop) -> None:
    loop.log("names in the state dict", len(loop.model.state_dict()))


def _make_two_optimizers(loop: Loop) -> None:
    matrices = [parameter for parameter in loop.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in loop.parameters() if parameter.dim() < 2]
    loop.optimizer = loop.prepare(loop.make_optimizer(matrices))
    loop.kept["second"] = loop.prepare(loop.make_optimizer(others))


def _step_both(loop: Loop) -> None:
    loop.optimizer.step()
    loop.kept["second"].step()


def _clear_both(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.kept["second"].zero_grad()


def _freeze_vectors(loop: Loop) -> None:
    loop.kept["later"] = [parameter for parameter in loop.parameters() if parameter.dim() < 2]
    for parameter in loop.kept["later"]:
        parameter.requires_grad_(False)


def _add_group(loop: Loop) -> None:
    if loop.steps == 1:
        for parameter in loop.kept["later"]:
            parameter.requires_grad_(True)
        loop.optimizer.add_param_group(
            {"params": loop.kept["later"], "lr": 0.5 * loop.case["rate"] / loop.case["norm"]}
        )


def _make_scheduler(loop: Loop) -> None:
    optimizer = loop.optimizer
    loop.kept["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def _step_scheduler(loop: Loop) -> None:
    loop.kept["scheduler"].step()


def _enable_checkpointing(loop: Loop) -> None:
    loop.model.gradient_checkpointing_enable()


def _compile(loop: Loop) -> None:
    loop.kept["compiled"] = torch.compile(loop.model, backend="eager")


def _run_compiled(loop: Loop, batch: dict[str, Tensor]) -> Tensor:
    return loop.kept["compiled"](**batch).loss


def _set_dropout(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.2


def _add_noise_to_embeddings(loop: Loop) -> None:
    def add_noise(module: nn.Module, arguments: tuple, output: Tensor) -> Tensor:
        return output + 0.1 * torch.randn_like(output) if module.training else output

    loop.model.get_input_embeddings().register_forward_hook(add_noise)


def _sample(loop: Loop) -> None:
    torch.manual_seed(99)
    prompt = loop.batches[0][0]["input_ids"][:2, :5]
    loop.model.eval()
    tokens = loop.model.generate(prompt, do_sample=True, max_new_tokens=4, pad_token_id=0)
    loop.model.train()
    for place, token in enumerate(tokens[:, 5:].flatten().tolist()):
        loop.log(f"sampled token {place}", token)


def _save_after_evaluation(loop: Loop) -> None:
    loop.evaluate()
    loop.model.save_pretrained(loop.folder + "_again")


def _make_stock_accelerator(loop: Loop) -> None:
    import accelerate

    loop.model = loop.optimizer = None
    # Schedulers and hooks keep the model alive.
    loop.kept.clear()
    gc.collect()
    accelerator = accelerate.Accelerator(cpu=True)
    loop.log("a later Accelerator has a layout", accelerator.parallelism_config is not None)


_JITTER = {"router_jitter_noise": 0.3}

WEIGHT_PATTERNS = (
    LoopPattern("weights scaled", "`p.mul_(0.5)` between steps", after_step=_scale_weights, acts=1),
    LoopPattern("data scaled", "`p.data = p.data * 0.5` between steps", after_step=_scale_data, acts=1),
    LoopPattern("data copied", "`p.data.copy_(...)` between steps", after_step=_copy_data, acts=1),
    LoopPattern(
        "weight rows edited",
        "`p[5].zero_()`, `p[6] = 0.25`, `p.data[7:9].mul_(0.5)` between steps",
        after_step=_edit_rows,
        acts=1,
    ),
    LoopPattern(
        "head drawn anew",
        "`torch.manual_seed(3)` and `nn.init.normal_(p)` of embedding and head between steps",
        after_step=_redraw_vocabulary,
        acts=1,
    ),
    LoopPattern(
        "part loaded", "`layer.load_state_dict` between steps", made=_save_layer, after_step=_load_layer, acts=1
    ),
    LoopPattern(
        "all loaded", "`model.load_state_dict` of an own `state_dict`", made=_save_all, after_step=_load_all, acts=1
    ),
    LoopPattern(
        "optimizer reloaded",
        "`optimizer.load_state_dict(optimizer.state_dict())`",
        after_step=_reload_optimizer,
        acts=1,
    ),
    LoopPattern(
        "average swapped",
        "a moving average swapped in for evaluation and back",
        made=_start_average,
        after_step=_swap_average,
        acts=1,
    ),
    LoopPattern(
        "average taken",
        "a moving average swapped in for good",
        made=_start_average,
        after_step=_swap_average_for_good,
        acts=1,
    ),
    LoopPattern(
        "copy averaged", "a moving average in a deep copy", made=_copy_model, after_step=_average_into_copy, acts=1
    ),
    LoopPattern("double", "`model.double()` before training", made=_cast_to_double),
    LoopPattern(
        "double later", "`model.to(torch.float64)` between steps", after_step=_cast_to_double_later, acts=1, trips=True
    ),
    LoopPattern("bfloat16", "`model.to(torch.bfloat16)` before training", made=_cast_to_bfloat16, needs=("fp32",)),
    LoopPattern("counted", "`num_parameters()`", made=_log_num_parameters),
    LoopPattern("names", "`state_dict()`'s names counted", made=_log_state_dict_size),
    LoopPattern(
        "two optimizers",
        "matrices and the rest in an optimizer each",
        prepared=_make_two_optimizers,
        step=_step_both,
        clear=_clear_both,
    ),
    LoopPattern("group added", "`add_param_group` between steps", made=_freeze_vectors, after_step=_add_group, acts=1),
    LoopPattern("scheduled", "a learning rate schedule", prepared=_make_scheduler, after_step=_step_scheduler),
    LoopPattern("checkpointing", "`gradient_checkpointing_enable()`", made=_enable_checkpointing),
    LoopPattern("compiled", "`torch.compile(model)`", made=_compile, forward=_run_compiled, slow=True),
    LoopPattern("dropout set later", "dropout set after loading, seeds that differ", made=_set_dropout, random=True),
    LoopPattern(
        "noisy embeddings",
        "a forward hook that adds noise, seeds that differ",
        made=_add_noise_to_embeddings,
        random=True,
    ),
    LoopPattern(
        "router jitter",
        "`router_jitter_noise`, seeds that differ",
        changes=_JITTER,
        needs=("experts", "jitter"),
        random=True,
    ),
    LoopPattern(
        "sampling", "`generate(do_sample=True)` after the same seed", after_step=_sample, needs=("causal",), acts=1
    ),
    LoopPattern(
        "saved after evaluation", "`save_pretrained` after an evaluation", ended=_save_after_evaluation, acts=3
    ),
    # Accelerator state is per process: a loop that uses one has already initialized it.
    LoopPattern(
        "stock afterwards", "a stock `Accelerator` after the model is gone", ended=_make_stock_accelerator, loop="plain"
    ),
)
