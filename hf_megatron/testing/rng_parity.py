"""RNG parity check: replicated weights stay equal across differently seeded ranks with dropout and jitter enabled."""

import contextlib
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig

from ..compat.torch_dtensor import local_tensor
from ..config import MegatronConfig
from ..core.fork_harness import first_reason, run_ranks
from ..core.off_stage import local_named_parameters
from ..errors import RankError
from ..models.fingerprint import is_rate, random_sites
from ..models.verification_gate import ConfigUnderTest
from ..parallel_state import parallel_state
from .measure import compute_batch_loss, on_device
from .parity import UNBUILDABLE, TinyModel

# A site may draw one number per layer: at this rate, ranks with different RNG states disagree half of the time.
_RATE = 0.5


def rates(config: PreTrainedConfig) -> frozenset[str]:
    """Returns the names of the rates in a config and its sub-configs."""
    names = {name for name, value in vars(config).items() if is_rate(name, value)}
    return frozenset(
        names.union(*(rates(part) for part in vars(config).values() if isinstance(part, PreTrainedConfig)))
    )


def set_rates(config: PreTrainedConfig, rate: float, names: frozenset[str]) -> None:
    """Sets the named rates in a config and its sub-configs."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            set_rates(value, rate, names)
        elif name in names and is_rate(name, value):
            # Some config classes only allow integer rates.
            with contextlib.suppress(StrictDataclassError):
                setattr(config, name, rate)


def _take_rates(model: nn.Module, other: nn.Module) -> None:
    """Copies the rates of all sites from another model of the same class with another config."""
    others = dict(other.named_modules())
    for name, module in model.named_modules():
        # A module may not exist in a model with a rate of zero.
        source = others.get(name)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = float(getattr(source, "p", 0.0))
        if source is not None:
            _take_numbers(module, source)
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                _take_numbers(config, vars(source).get("config"))


def _take_numbers(owner: Any, source: Any) -> None:
    values = vars(source) if source is not None else {}
    for name, value in list(vars(owner).items()):
        if is_rate(name, value) and is_rate(name, values.get(name)):
            setattr(owner, name, values[name])


def check_draws(
    tiny_model: TinyModel, layout: MegatronConfig, *, timeout: float = 120.0, device: str = "cpu"
) -> tuple[frozenset[str], str]:
    """Trains the tiny model on differently seeded ranks, with each rate enabled alone and then with all that passed.

    Rates are enabled alone first, because one site that synchronizes the RNG may hide that another one does not.

    Args:
        tiny_model (`TinyModel`): model to train.
        layout (`MegatronConfig`): parallel layout.
        timeout (`float`, defaults to 120.0): seconds for each training run.
        device (`str`, defaults to `"cpu"`): device of the ranks.

    Returns:
        `tuple[frozenset[str], str]`: the sites that drew random numbers while all replicated weights stayed bit-equal
        across the ranks, and a description of the failures, empty if there are none.
    """
    together = sorted(rates(tiny_model.model_on_meta().config))
    if not together:
        return frozenset(), ""
    alone = [[name] for name in together if _is_read(tiny_model, name)]
    if len(alone) < 2:
        # The run with all rates has one active rate at most, so separate runs are redundant.
        alone = []
    last: _Outcome | None
    try:
        *outcomes, last = _train(tiny_model, layout, [*alone, together], timeout, device)
    except RankError:
        # One failed run ends all that come after it: repeat them in separate jobs.
        outcomes = [_train_alone(tiny_model, layout, trial, timeout, device) for trial in alone]
        last = None
    apart = {name for [name], outcome in zip(alone, outcomes, strict=True) if outcome.problem}
    passed = [name for name in together if name not in apart]
    if last is None or apart:
        last = _train_alone(tiny_model, layout, passed, timeout, device)
    trials = zip([*alone, passed], [*outcomes, last], strict=True)
    said = {"+".join(names): outcome.problem for names, outcome in trials if outcome.problem}
    problem = "; ".join(f"{names}: {problem}" for names, problem in said.items())
    return (frozenset() if last.problem else last.sites), problem


def _is_read(tiny_model: TinyModel, name: str) -> bool:
    """Returns whether one rate alone makes the tiny model draw random numbers, or fail to be built."""
    config = tiny_model.model_on_meta().config
    set_rates(config, 0.0, rates(config))
    set_rates(config, _RATE, frozenset([name]))
    model = _on_meta(tiny_model, config)
    return model is None or bool(random_sites(model))


def _on_meta(tiny_model: TinyModel, config: PreTrainedConfig) -> Any:
    """Builds the tiny model with another config on the meta device; returns `None` if its class rejects the config."""
    try:
        with torch.device("meta"):
            return type(tiny_model.model_on_meta())(config)
    except UNBUILDABLE:
        return None


@dataclass(frozen=True)
class _Outcome:
    """Result of a training run: the sites that drew random numbers, and a description of the failure, if any."""

    sites: frozenset[str]
    problem: str


def _train_alone(
    tiny_model: TinyModel, layout: MegatronConfig, trial: list[str], timeout: float, device: str
) -> _Outcome:
    try:
        [outcome] = _train(tiny_model, layout, [trial], timeout, device)
    except RankError as error:
        return _Outcome(frozenset(), first_reason(str(error)))
    return outcome


def _train(
    tiny_model: TinyModel, layout: MegatronConfig, trials: list[list[str]], timeout: float, device: str
) -> list[_Outcome]:
    """Trains the tiny model once for each list of rates; the last list includes all others."""
    under_test = ConfigUnderTest(**layout.to_dict())
    configs = []
    for trial in trials:
        configs.append(tiny_model.model_on_meta().config)
        set_rates(configs[-1], _RATE, frozenset(trial))
    others = [_on_meta(tiny_model, config) for config in configs]

    def on_rank() -> list[tuple[frozenset[str], dict[str, torch.Tensor]]]:
        model = tiny_model.load(config=configs[-1], megatron_config=under_test)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        results = []
        for config, other in zip(configs, others, strict=True):
            if other is not None:
                _take_rates(model, other)
            if other is None or random_sites(model) != random_sites(other):
                # The class builds other modules, or fails, with a rate of zero: load it with its own config.
                loaded = tiny_model.load(config=config, megatron_config=under_test)
                results.append(_trained(loaded, tiny_model.batches))
                continue
            results.append(_trained(model, tiny_model.batches))
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
            model.zero_grad()
        return results

    results = run_ranks(on_rank, layout.ranks_per_replica, timeout=timeout * len(trials), device=device)
    return [_outcome([rank[index] for rank in results]) for index in range(len(trials))]


def _trained(model: Any, batches: list[dict[str, Any]]) -> tuple[frozenset[str], dict[str, torch.Tensor]]:
    """Returns the sites where a model draws random numbers, and its replicated weights after one step."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(dist.get_rank())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in on_device(batches, model):
        compute_batch_loss(model, batch)[0].backward()
    optimizer.step()
    return random_sites(model), _replicated(model)


def _outcome(ranks: list[tuple[frozenset[str], dict[str, torch.Tensor]]]) -> _Outcome:
    sites, weights = ranks[0]
    apart = [name for name in weights if any(not torch.equal(weights[name], other[name]) for _, other in ranks)]
    return _Outcome(sites, f"replicated weights differ between ranks: {', '.join(apart[:3])}" if apart else "")


def _replicated(model: Any) -> dict[str, torch.Tensor]:
    state = parallel_state(model)
    assert state is not None
    return {
        name: local_tensor(parameter.detach()).to("cpu", copy=True)
        for name, parameter in local_named_parameters(model)
        if not state.placement(name).is_split
    }
