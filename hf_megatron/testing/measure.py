"""Measurement of a model: loss, all gradients, their norm, and weights after two optimizer steps, as full tensors."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ..checkpoint.gather_full import gather_parameter
from ..compat.torch_dtensor import local_tensor
from ..compat.transformers_models import is_base_model
from ..core.mesh import ParallelMesh
from ..core.off_stage import local_named_parameters
from ..data_parallel.batch_norm import batch_norms
from ..data_parallel.distributed_optimizer import prepare_optimizer
from ..data_parallel.grad_norm import gradient_norm
from ..data_parallel.output_checks import skip_comparison
from ..errors import ConfigError
from ..losses.inline_losses import get_output_loss
from ..models.fingerprint import silence
from ..models.modalities.sample_index import modality_names, multimodal_samples
from ..models.type_facts import get_type_facts
from ..parallel_state import parallel_state, unwrap_parallel_model

# The default eps of AdamW turns round-off in gradients that are zero in exact arithmetic (key biases, for one) into
# full-size updates. SGD's learning rate scales with 1 / norm, else two steps with large gradients amplify round-off.
OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, norm: torch.optim.SGD(parameters, lr=0.05 * _power_of_two_below(norm), momentum=0.9),
    "adamw": lambda parameters, norm: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
STEPS = 2


def _power_of_two_below(norm: float) -> float:
    """Returns 1 / norm rounded to a power of two, at most 1, so that norms that differ by round-off give one value."""
    return 2.0 ** -max(0, round(math.log2(norm))) if math.isfinite(norm) and norm > 0 else 1.0


@dataclass
class Measurement:
    """Results of one model; gradients and weights are full tensors (of parallel models: on global rank 0 only).

    Attributes:
        loss: mean loss of the microbatches in training mode.
        eval_loss: loss of the first batch in evaluation mode.
        norm: gradient norm.
        gradients: parameter name -> full gradient, `None` without a gradient.
        weights: optimizer -> parameter name -> full weight after `STEPS` steps.
        without: patterns of the parameters that are known to get no gradient.
        cancelled: names of the parameters whose gradient is zero in exact arithmetic.
        round_off: for a reference, its largest fp32 error in units of the limit.
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
    """Returns the samples of this data-parallel rank; local batch sizes differ by at most one."""
    state = parallel_state(model)
    if state is None or state.mesh.dp_size == 1:
        return batch
    ranks, rank = state.mesh.dp_size, state.mesh.dp_rank
    model_config = unwrap_parallel_model(model).config
    modalities = modality_names(batch, model_config)
    samples = {
        name: value.tensor_split(ranks)[rank] if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name not in modalities
    }
    if modalities:
        sample_indices = torch.arange(len(batch["input_ids"])).tensor_split(ranks)[rank]
        rows = slice(int(sample_indices[0]), int(sample_indices[-1]) + 1) if len(sample_indices) else slice(0, 0)
        samples |= multimodal_samples(batch, rows, model_config)
    return samples


def on_device(batches: list[dict[str, Tensor]], model: nn.Module) -> list[dict[str, Tensor]]:
    """Returns batches on the device of a model's parameters."""
    device = next(model.parameters()).device
    return [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


def _parameters(model: Any) -> dict[str, nn.Parameter]:
    """Returns a model's local parameters by name, without the `base_model.` prefix of a `PeftModel`."""
    tied = getattr(unwrap_parallel_model(model), "all_tied_weights_keys", {})
    # Use the source name of a tied weight, which is the same on all pipeline stages.
    named = {tied.get(name, name): parameter for name, parameter in local_named_parameters(model)}
    return {name.removeprefix("base_model."): parameter for name, parameter in named.items()}


def _in_order(parameter: nn.Parameter) -> Tensor | None:
    """Returns a gradient, or NaNs if its memory layout differs from the parameter's, so that the comparison fails.

    Fused optimizers iterate over both in memory order, so different layouts would silently pair wrong entries.
    """
    gradient = parameter.grad
    if gradient is None or _strides(gradient) == _strides(parameter):
        return gradient
    return torch.full_like(gradient, math.nan)


def _strides(tensor: Tensor) -> list[int]:
    """Returns the strides of the local tensor, without dims of size 1, whose stride has no effect."""
    local = local_tensor(tensor)
    return [stride for stride, size in zip(local.stride(), local.shape, strict=True) if size != 1]


def _gradients(model: Any) -> dict[str, Tensor | None]:
    """Returns the gradients of trainable parameters as the optimizer will use them, in the parameters' local shapes."""
    trained = {name: parameter for name, parameter in _parameters(model).items() if parameter.requires_grad}
    state = parallel_state(model)
    reducer = None if state is None or state.data_parallel is None else state.data_parallel.reducer
    if reducer is None:
        return {name: _in_order(parameter) for name, parameter in trained.items()}
    # Wait for the reductions in flight; with ZeRO the reduced gradient is gathered from the data-parallel ranks.
    reducer.finish()
    return {name: reducer.full_gradient(parameter) for name, parameter in trained.items()}


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Returns whether a weight is quantized, by this library or by torchao."""
    return not parameter.is_floating_point() or type(parameter).__module__.startswith("torchao.")


def _full(model: Any, values: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    state = parallel_state(model)
    if state is None:
        return {name: None if value is None else _on_host(value) for name, value in values.items()}
    full: dict[str, Tensor | None] = {}
    parameters = _parameters(model)
    for name, value in _on_all_ranks(values, parameters).items():
        gathered = None if value is None else gather_parameter(model, name, value)
        # Copy: a replicated tensor is returned without a copy, and the optimizer is about to change it.
        full[name] = None if gathered is None else _on_host(gathered)
    if state.mesh.pp_size > 1:
        # So far each stage has gathered its own parameters only.
        full = _of_all_stages(full, state.mesh)
    return full if dist.get_rank() == 0 else {}


def _on_host(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _on_all_ranks(
    values: Mapping[str, Tensor | None], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor | None]:
    """Returns values that are `None` on all ranks or on none, because gathering is collective; fills gaps with NaNs."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name for name, value in values.items() if value is not None})
    anywhere = set().union(*held)
    return {
        name: torch.full_like(parameters[name].detach(), math.nan) if value is None and name in anywhere else value
        for name, value in values.items()
    }


def _of_all_stages(local_tensors: dict[str, Tensor | None], mesh: ParallelMesh) -> dict[str, Tensor | None]:
    """Merges the tensors of all pipeline stages; a tied tensor whose copies differ becomes NaN."""
    parts: list[dict[str, Tensor | None]] = [{}] * mesh.pp_size
    dist.all_gather_object(parts, local_tensors, group=mesh.pp_group)
    merged: dict[str, Tensor | None] = {}
    for part in parts:
        for name, tensor in part.items():
            other = merged.setdefault(name, tensor)
            if tensor is not None and other is not None and not torch.equal(tensor, other):
                merged[name] = torch.full_like(tensor, math.nan)
    return merged


def compute_batch_loss(
    model: Any, batch: dict[str, Tensor], batches: int = 1, *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the scalar loss of a batch divided by `batches`, for the backward of this rank and as a global value.

    The loss of a base model, which computes none, is computed from its hidden states `[batch, sequence, hidden]`.

    Args:
        model: the model, possibly parallel or inside a `PeftModel`.
        batch (`dict[str, Tensor]`): the global batch; each data-parallel rank takes its samples.
        batches (`int`, defaults to 1): number of microbatches per optimizer step.
        shared (`bool`, defaults to `False`): run all samples on every data-parallel rank.
    """
    rows = batch if shared else _samples_on_this_rank(model, batch)
    output = model(**rows)
    if not is_base_model(unwrap_parallel_model(model)):
        # Classes of a script may return a plain dict or a tuple.
        plain = isinstance(output, (dict, tuple)) and not isinstance(output, ModelOutput)
        loss = get_output_loss(output, takes_loss=True) if plain else output.loss
        if loss is None:
            raise ConfigError(f"{type(model).__name__} returns no loss for {', '.join(sorted(rows))}.")
        return loss / batches, loss.detach() / batches
    values = output.last_hidden_state * rows["attention_mask"][..., None]
    # Targets around zero, so that gradients have both signs.
    loss = (values - torch.linspace(-1, 1, values.shape[-1], device=values.device)).square().sum()
    if output.get("pooler_output") is not None:
        loss = loss + output.pooler_output.square().sum()
    state = parallel_state(model)
    # Divide by the global size: the data-parallel ranks' losses then sum to the single-process mean.
    loss = loss / (len(batch["input_ids"]) * values[0].numel() * batches)
    global_loss = loss.detach().clone()
    if state is not None and state.mesh.dp_size > 1 and not shared:
        dist.all_reduce(global_loss, group=state.mesh.dp_group)
        # The gradient reduction averages over data-parallel ranks, so the local loss is scaled up.
        loss = loss * state.mesh.dp_size
    return loss, global_loss


def _backward(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Accumulates one step's gradients, which the last backward reduces, and returns the mean microbatch loss."""
    total = 0.0
    for index, batch in enumerate(batches):
        with contextlib.ExitStack() as stack:
            if index < len(batches) - 1 and "no_sync" in vars(unwrap_parallel_model(model)):
                stack.enter_context(unwrap_parallel_model(model).no_sync())
            loss, of_all_ranks = compute_batch_loss(model, batch, len(batches))
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
    """Measures a model on the microbatches of one step; the model's weights are restored afterwards.

    Args:
        model: the model, possibly parallel or inside a `PeftModel`.
        batches (`list[dict[str, Tensor]]`): microbatches of one optimizer step, as global batches.
        optimizers (`Iterable[str]`): keys of `OPTIMIZERS`, each run for `STEPS` steps from the initial weights.
        is_silent (`bool`, defaults to `True`): set dropout and jitter rates to zero, because ranks with sharded
            activations cannot draw the random numbers of a single process.
        norms_are_frozen (`bool`, defaults to `False`): keep batch norms in evaluation mode, which is required if a norm
            sees only part of the batch.
    """
    if is_silent:
        silence(model)
    inner = unwrap_parallel_model(model)
    skip_comparison(parallel_state(inner))
    batches = on_device(batches, inner)
    model.eval()
    with torch.no_grad():
        eval_loss = compute_batch_loss(model, batches[0], shared=True)[1].item()
    model.train()
    for part in (*get_type_facts(inner.config.model_type).frozen, *(batch_norms(inner) if norms_are_frozen else ())):
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
    # The first step of the first optimizer uses the gradients of the backward above.
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
