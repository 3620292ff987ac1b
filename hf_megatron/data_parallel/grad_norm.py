"""Global gradient norm and clipping: combines the shards of all ranks and counts each entry once."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compat.tensor_lists import list_local_tensors
from ..core.communication.full_tensor import list_placed_gradients
from ..core.off_stage import OffStageTensor
from ..errors import ConfigError
from .engine import DataParallel, get_engine
from .finite_verdict import FiniteVerdict
from .grad_reducer import GradientReducer
from .model_parameters import MARK
from .norm_checks import ListOfRanks, has_all, list_engines, pipelines


def _distinct(tensor: Tensor) -> int:
    """Returns the number of different shards that a tensor has by its placements."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def local_gradients(parameters: Iterable[Tensor]) -> dict[int, list[Tensor]]:
    """Returns this rank's shards of the reduced gradients, grouped by the number of ranks that hold the same entries.

    Collective: it completes reductions over the data-parallel ranks.

    Returns:
        number of copies of an entry over all ranks -> gradients of any shape.
    """
    # Runs once or twice in each step: a parameter costs no Python call once its number of copies is known.
    shares: dict[int, list[Tensor]] = {}
    gradients_of: dict[GradientReducer, dict[int, Tensor]] = {}
    others: list[Tensor] = []
    for parameter in parameters:
        if isinstance(parameter, OffStageTensor):
            continue
        engine = vars(parameter).get(MARK) or get_engine(parameter)
        reducer = None if engine is None else engine.reducer
        if engine is None or reducer is None or id(parameter) not in reducer.places:
            others.append(parameter)
            continue
        if reducer not in gradients_of:
            reducer.finalize()
            gradients_of[reducer] = reducer.list_gradients()
        gradient = gradients_of[reducer].get(id(parameter))
        if gradient is None or not gradient.numel():
            continue
        copies = engine.parameters.reduced_copies.get(id(parameter))
        if copies is None:
            parts = reducer.sharing_of(parameter).shard_size
            copies = engine.parameters.reduced_copies[id(parameter)] = _copies(engine, parameter, parameter, parts)
        shares.setdefault(copies, []).append(gradient)
    placed = list_placed_gradients(others)
    for parameter, gradient, local in zip(others, placed, list_local_tensors(placed), strict=True):
        if gradient is None or local is None or not local.numel():
            continue
        engine = vars(parameter).get(MARK)
        is_like = isinstance(gradient, DTensor) == isinstance(parameter, DTensor)
        known = engine.parameters.copies if engine is not None and is_like else {}
        copies = known.get(id(parameter))
        if copies is None:
            copies = known[id(parameter)] = _copies(engine, parameter, gradient, 1)
        shares.setdefault(copies, []).append(local)
    return shares


def _copies(engine: DataParallel | None, parameter: Tensor, placed: Tensor, parts: int) -> int:
    """Returns the number of ranks that hold the same entries of a gradient with the placements of `placed`."""
    # holders = ranks with the parameter or a shard of it; over tp shards and dp shards (`parts`), entries differ.
    holders = dist.get_world_size() if engine is None else engine.parameters.holders(parameter)
    return holders // (_distinct(placed) * parts)


def _norm(listed: ListOfRanks, shares: dict[int, list[Tensor]], norm_type: float) -> tuple[Tensor, Tensor]:
    """Computes the norm over all ranks with one all-reduce.

    Returns:
        the norm, a scalar, and the reduced tensor `[1 + flags]`: the sum of powers (or the maximum), and the flags.
    """
    infinite = norm_type == math.inf
    meshes = [mesh.device for mesh in pipelines()]
    shard_devices = [shard.device for shards in shares.values() for shard in shards[:1]]
    device = next(iter((*shard_devices, *meshes)), torch.device("cpu"))
    reduced = torch.zeros(1 + len(listed.flags), dtype=torch.float32, device=device)
    for index, flag in enumerate(listed.flags):
        # `fill_` passes the value as a kernel argument; copying a host tensor would synchronize with the device.
        reduced[1 + index].fill_(flag)
    total = reduced[0]
    for copies, shards in shares.items():
        # Each of `copies` ranks adds the same power sum: divide, so that every entry counts once.
        norms = torch.stack(torch._foreach_norm(shards, norm_type)).float()
        part = norms.max() if infinite else norms.pow(norm_type).sum() / copies
        total.copy_(torch.maximum(total, part) if infinite else total + part)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    return total if infinite else total.pow(1.0 / norm_type), reduced


def gradient_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the gradient norm of all parameters, an fp32 scalar that is the same on every rank; collective.

    Args:
        parameters: parameters of a parallelized model; others are treated as replicated on all ranks of the job.
        norm_type (`float`, defaults to 2): p-norm with p of 1 or more, or infinity.
    """
    parameters = list(parameters)
    listed = ListOfRanks(parameters)
    for engine in listed.engines:
        engine.require_reduced()
    norm, reduced = _norm(listed, local_gradients(parameters), norm_type)
    if listed.flags:
        listed.judge(reduced[1:].tolist())
    return norm


def has_finite_gradients(parameters: Iterable[Tensor], *, may_wait: bool = True) -> bool | FiniteVerdict:
    """Returns whether all gradients of an optimizer's parameters are finite on all ranks; collective.

    The only place in a step where the host waits for the device: norm and flags are read together.

    Args:
        may_wait (`bool`, defaults to `True`): otherwise a verdict is returned, except in a pipeline, which has flags.
    """
    parameters = list(parameters)
    listed = ListOfRanks(parameters, in_step=True)
    reduced = _norm(listed, _list_for_check(parameters, listed.engines), 2.0)[1]
    if not may_wait and not listed.flags:
        return FiniteVerdict(reduced[0])
    total, *flags = reduced.tolist()
    listed.judge(flags)
    return math.isfinite(total)


def _list_for_check(parameters: list[Tensor], engines: list[DataParallel]) -> dict[int, list[Tensor]]:
    """Returns tensors that are finite if all gradients are, as `local_gradients`: one per bucket where that is enough.

    Entries may count several times, or be those of parameters without a gradient, which are zeros.
    """
    ids, covered, shards = set(map(id, parameters)), set[int](), list[Tensor]()
    for engine in engines:
        if engine.reducer is None or ids.isdisjoint(engine.reducer.places):
            continue
        engine.reducer.finalize()
        for bucket in engine.reducer.buckets:
            # Padding has any values.
            if bucket.owns_all_columns and ids.issuperset(bucket.keys):
                covered.update(bucket.keys)
                shards += [] if bucket.shard is None else [bucket.shard]
    found = local_gradients([parameter for parameter in parameters if id(parameter) not in covered])
    if shards:
        found.setdefault(1, []).extend(shards)
    return found


def check_norm(norm: Tensor, error_if_nonfinite: bool) -> Tensor:
    """Returns the norm, a scalar; raises torch's `RuntimeError` if it is not finite and `error_if_nonfinite`."""
    if error_if_nonfinite:
        _require_finite(bool(torch.isfinite(norm)))
    return norm


def _require_finite(is_finite: bool) -> None:
    if not is_finite:
        raise RuntimeError(
            "The total norm for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    in_step: bool = False,
) -> Tensor:
    """Clips gradients of any shape to a global norm of `max_norm`; collective.

    Args:
        in_step (`bool`, defaults to `False`): whether an optimizer step calls it for its parameters; see `ListOfRanks`.

    Returns:
        the norm before clipping, a scalar.
    """
    if norm_type < 1:
        raise ConfigError(f"clip_grad_norm: norm_type = {norm_type}; expected 1 or more, or infinity.")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    listed = ListOfRanks(parameters, in_step=in_step)
    for engine in listed.engines:
        engine.require_reduced()
    shares = local_gradients(parameters)
    norm, reduced = _norm(listed, shares, norm_type)
    # The host waits for the norm only if this call needs it: the step may leave the verdict on the device.
    is_finite: bool | FiniteVerdict = FiniteVerdict(reduced[0])
    is_replicated = listed.judge(reduced[1:].tolist()) if listed.flags else listed.is_complete
    if error_if_nonfinite:
        _require_finite(bool(is_finite))
    for engine in listed.engines:
        engine.step_status.record_clipping(max_norm, is_finite=is_finite, is_replicated=is_replicated)
    _scale(shares, norm, max_norm)
    return norm


def clip_with_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Clips gradients of any shape to `max_norm`, given their global norm `total_norm`, a scalar."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else torch.as_tensor(total_norm)
    engines = list_engines(parameters)
    is_finite = FiniteVerdict(norm)
    for engine in engines:
        # This rank's parameters do not show whether the other pipeline stages passed all of theirs.
        is_replicated = engine.state.cut is None and has_all(parameters, [engine])
        engine.step_status.record_clipping(max_norm, is_finite=is_finite, is_replicated=is_replicated)
    _scale(local_gradients(parameters), norm, max_norm)


def _scale(shares: dict[int, list[Tensor]], norm: Tensor, max_norm: float) -> None:
    # The formula of `torch.nn.utils.clip_grad_norm_`, so that clipped runs match the single-process run.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shards in shares.values():
        torch._foreach_mul_(shards, factor.to(shards[0].device))
