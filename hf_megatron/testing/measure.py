"""What is compared: loss, every gradient, its norm, and the weights after two optimizer steps, all in full."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.gather_full import gather_parameter
from ..compat.torch_dtensor import local_tensor
from ..compat.transformers_models import is_base_model
from ..core.mesh import ParallelMesh
from ..core.off_stage import local_named_parameters
from ..data_parallel.batch_norm import batch_norms
from ..data_parallel.distributed_optimizer import prepare_optimizer
from ..data_parallel.grad_norm import gradient_norm
from ..models.fingerprint import silence
from ..models.modalities.sample_index import modality_names, multimodal_samples
from ..models.type_facts import facts_of
from ..parallel_state import parallel_state, unwrap_parallel_model

# The default eps of AdamW turns round-off in gradients that are zero in exact arithmetic (key biases, for one) into
# whole steps. SGD's rate follows the gradient, else two steps of a steep model amplify round-off as far as they like.
OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, norm: torch.optim.SGD(parameters, lr=0.05 * _power_of_two_below(norm), momentum=0.9),
    "adamw": lambda parameters, norm: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
STEPS = 2


def _power_of_two_below(norm: float) -> float:
    """1 / norm in whole powers of two, the same for two norms that differ by round-off; at most 1."""
    return 2.0 ** -max(0, round(math.log2(norm))) if math.isfinite(norm) and norm > 0 else 1.0


@dataclass
class Measurement:
    """One model's numbers; gradients and weights are full tensors (on parallel models: of tp rank 0 only).

    Attributes:
        without: patterns of the parameters that are known to get no gradient.
        cancelled: names of the parameters whose gradient is zero in exact arithmetic.
        round_off: of a reference, its largest error in fp32, in limits.
    """

    loss: float
    eval_loss: float
    norm: float
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    cancelled: frozenset[str] = frozenset()
    round_off: float = 0.0


def _samples_on_this_rank(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cuts out the rows of a batch that this data parallel rank sees, as equal in number as they come."""
    state = parallel_state(model)
    if state is None or state.mesh.dp_size == 1:
        return batch
    ranks, rank = state.mesh.dp_size, state.mesh.dp_rank
    model_config = unwrap_parallel_model(model).config
    modalities = modality_names(batch, model_config)
    found = {
        name: value.tensor_split(ranks)[rank] if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name not in modalities
    }
    if modalities:
        numbers = torch.arange(len(batch["input_ids"])).tensor_split(ranks)[rank]
        rows = slice(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else slice(0, 0)
        found |= multimodal_samples(batch, rows, model_config)
    return found


def on_device(batches: list[dict[str, Tensor]], model: nn.Module) -> list[dict[str, Tensor]]:
    """Returns batches where a model's parameters are."""
    device = next(model.parameters()).device
    return [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns a model's parameters by name, those of one in a `PeftModel` by their names in it."""
    tied = getattr(unwrap_parallel_model(model), "all_tied_weights_keys", {})
    # Of one weight the name that holds on all stages.
    named = {tied.get(name, name): parameter for name, parameter in local_named_parameters(model)}
    return {name.removeprefix("base_model."): parameter for name, parameter in named.items()}


def _in_order(parameter: nn.Parameter) -> Tensor | None:
    """Returns a gradient of any shape, worth nothing where its memory has another order than the parameter's.

    Fused optimizers go through both from the first entry to the last.
    """
    gradient = parameter.grad
    if gradient is None or _strides(gradient) == _strides(parameter):
        return gradient
    return torch.full_like(gradient, math.nan)


def _strides(tensor: Tensor) -> list[int]:
    """Lists the strides of a tensor of any shape that say where entries lie."""
    local = local_tensor(tensor)
    return [stride for stride, size in zip(local.stride(), local.shape, strict=True) if size != 1]


def _gradients(model: Any) -> dict[str, Tensor | None]:
    """Returns the gradients of trainable parameters as the optimizer will use them, each in the local shape."""
    trained = {name: parameter for name, parameter in _parameters(model).items() if parameter.requires_grad}
    state = parallel_state(model)
    reducer = None if state is None or state.data_parallel is None else state.data_parallel.reducer
    if reducer is None:
        return {name: _in_order(parameter) for name, parameter in trained.items()}
    reducer.finish()
    return {name: reducer.full_gradient(parameter) for name, parameter in trained.items()}


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Tells whether a weight is there as codes, of this library or of another."""
    return not parameter.is_floating_point() or type(parameter).__module__.startswith("torchao.")


def _full(model: Any, values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    state = parallel_state(model)
    if state is None:
        return {name: None if value is None else _on_host(value) for name, value in values.items()}
    full: dict[str, Tensor | None] = {}
    parameters = _parameters(model)
    for name, value in _on_all_ranks(values, parameters).items():
        gathered = None if value is None else gather_parameter(model, name, value)
        # A replicated tensor is handed out as it is; the optimizer is about to change it.
        full[name] = None if gathered is None else _on_host(gathered)
    if state.mesh.pp_size > 1:
        full = _of_all_stages(full, state.mesh)
    return full if dist.get_rank() == 0 else {}


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _on_all_ranks(
    values: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor | None]:
    """Returns values that all ranks hold or none does: gathering is joint; one that some miss is worth nothing."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name for name, value in values.items() if value is not None})
    anywhere = set().union(*held)
    return {
        name: torch.full_like(parameters[name].detach(), math.nan) if value is None and name in anywhere else value
        for name, value in values.items()
    }


def _of_all_stages(own: dict[str, Tensor | None], mesh: ParallelMesh) -> dict[str, Tensor | None]:
    """Gathers the tensors of every stage; copies of a tied one that differ are worth nothing."""
    parts: list[dict[str, Tensor | None]] = [{}] * mesh.pp_size
    dist.all_gather_object(parts, own, group=mesh.pp_group)
    unsharded: dict[str, Tensor | None] = {}
    for part in parts:
        for name, tensor in part.items():
            other = unsharded.setdefault(name, tensor)
            if tensor is not None and other is not None and not torch.equal(tensor, other):
                unsharded[name] = torch.full_like(tensor, math.nan)
    return unsharded


def loss_of_batch(
    model: Any, batch: dict[str, Tensor], batches: int = 1, *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns a batch's share of the loss, a scalar, as this rank differentiates it and as one process has it.

    That of a base model, which computes none, is made of its hidden states. With `shared` each dp rank sees all rows.
    """
    rows = batch if shared else _samples_on_this_rank(model, batch)
    output = model(**rows)
    if not is_base_model(unwrap_parallel_model(model)):
        return output.loss / batches, output.loss.detach() / batches
    values = output.last_hidden_state * rows["attention_mask"][..., None]
    # A target in the middle: gradients are of all signs.
    loss = (values - torch.linspace(-1, 1, values.shape[-1], device=values.device)).square().sum()
    if output.get("pooler_output") is not None:
        loss = loss + output.pooler_output.square().sum()
    state = parallel_state(model)
    loss = loss / (len(batch["input_ids"]) * values[0].numel() * batches)
    unsharded = loss.detach().clone()
    if state is not None and state.mesh.dp_size > 1 and not shared:
        dist.all_reduce(unsharded, group=state.mesh.dp_group)
        loss = loss * state.mesh.dp_size
    return loss, unsharded


def _backward(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """One optimizer step's worth of gradient: the mean of the microbatch losses, reduced with the last one."""
    total = 0.0
    for index, batch in enumerate(batches):
        with contextlib.ExitStack() as stack:
            if index < len(batches) - 1 and "no_sync" in vars(unwrap_parallel_model(model)):
                stack.enter_context(unwrap_parallel_model(model).no_sync())
            loss, of_all_ranks = loss_of_batch(model, batch, len(batches))
            loss.backward()
        total += of_all_ranks.item()
    return total


def measure(
    model: Any,
    batches: list[dict[str, Tensor]],
    optimizers: Iterable[str] = tuple(OPTIMIZERS),
    *,
    is_silent: bool = True,
    norms_are_frozen: bool = False,
) -> Measurement:
    """Measures a model on the microbatches of one step; the model's weights are as before afterwards.

    With `is_silent` rates of dropout and jitter are set to zero: what split ranks draw cannot equal what one process
    draws, unless all of them draw it alike. With `norms_are_frozen` those by the statistics of a batch are in
    evaluation mode, as calls in which some see a part of the batch ask for.
    """
    if is_silent:
        silence(model)
    inner = unwrap_parallel_model(model)
    batches = on_device(batches, inner)
    model.eval()
    with torch.no_grad():
        eval_loss = loss_of_batch(model, batches[0], shared=True)[1].item()
    model.train()
    for part in (*facts_of(inner.config.model_type).frozen, *(batch_norms(inner) if norms_are_frozen else ())):
        inner.get_submodule(part).eval()
    inner.zero_grad()
    loss = _backward(model, batches)
    gradients = _gradients(inner)
    parameters = {name: parameter for name, parameter in _parameters(inner).items() if not _is_quantized(parameter)}
    result = Measurement(loss, eval_loss, float("nan"), _full(inner, gradients))
    if parallel_state(model) is None:
        norms = [gradient.norm() for gradient in gradients.values() if gradient is not None]
        result.norm = torch.stack(norms).norm().item()
    else:
        result.norm = gradient_norm(parameters.values()).item()

    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    # The first step of the first optimizer takes the gradients that are there.
    has_gradients = True
    for optimizer_name in optimizers:
        optimizer = prepare_optimizer(OPTIMIZERS[optimizer_name](parameters.values(), result.norm))
        for _ in range(STEPS):
            if not has_gradients:
                optimizer.zero_grad()
                _backward(model, batches)
            optimizer.step()
            has_gradients = False
        weights = _full(inner, parameters)
        result.weights[optimizer_name] = {name: weight for name, weight in weights.items() if weight is not None}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name])
    inner.zero_grad()
    return result
