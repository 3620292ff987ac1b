"""Whether ranks stay alike while a model draws random numbers: its dropout and jitter on, ranks seeded differently."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..absent_weights import own_parameters
from ..config import MegatronConfig
from ..errors import RankError
from ..integrations.gate import ConfigUnderTest
from ..parallel_state import parallel_state
from ..registry.features import is_rate, random_sites
from ..upstream import local_tensor
from .measure import loss_of_batch, on_device
from .parity import Twin
from .ranks import first_reason, run_ranks

_STEPS = 3
_RATE = 0.1


def rates(config: PreTrainedConfig) -> frozenset[str]:
    """Names the rates of a config and of its parts."""
    found = {name for name, value in vars(config).items() if is_rate(name, value)}
    return frozenset(
        found.union(*(rates(part) for part in vars(config).values() if isinstance(part, PreTrainedConfig)))
    )


def set_rates(config: PreTrainedConfig, rate: float, names: frozenset[str]) -> None:
    """Sets the named rates of a config and of its parts."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            set_rates(value, rate, names)
        elif name in names and is_rate(name, value):
            # Some are whole numbers, by what their classes allow.
            with contextlib.suppress(StrictDataclassError):
                setattr(config, name, rate)


def check_draws(
    twin: Twin, layout: MegatronConfig, *, timeout: float = 120.0, device: str = "cpu"
) -> tuple[frozenset[str], str]:
    """Trains the twin with each of its rates on, then with all that may be, and ranks that were seeded differently.

    Alone, because what one site does for all may hide what another one lacks.

    Returns:
        the sites that drew random numbers while all replicated weights stayed bit-equal over the ranks, and what went
        wrong where not all of them did.
    """
    problems: dict[str, str] = {}
    sites: frozenset[str] = frozenset()

    def stays_alike(names: frozenset[str]) -> bool:
        nonlocal sites
        try:
            sites, apart = _train(twin, layout, names, timeout, device)
        except RankError as error:
            problems["+".join(sorted(names))] = first_reason(str(error))
            return False
        if apart:
            problems["+".join(sorted(names))] = f"replicated weights differ between ranks: {', '.join(apart[:3])}"
        return not apart

    names = rates(twin.model_on_meta().config)
    alike = frozenset(name for name in sorted(names) if stays_alike(frozenset({name})))
    # One rate alone was trained with just now.
    passed = bool(alike) and (len(names) == 1 or stays_alike(alike))
    said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return (sites if passed else frozenset()), said


def _train(
    twin: Twin, layout: MegatronConfig, names: frozenset[str], timeout: float, device: str
) -> tuple[frozenset[str], list[str]]:
    """Returns where the twin drew random numbers, and the replicated weights that differ afterwards."""
    config = twin.model_on_meta().config
    set_rates(config, _RATE, names)
    under_test = ConfigUnderTest(**layout.to_dict())

    def on_rank() -> tuple[frozenset[str], dict[str, torch.Tensor]]:
        model = twin.load(config=config, megatron_config=under_test)
        torch.manual_seed(dist.get_rank())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(_STEPS):
            for batch in on_device(twin.batches, model):
                loss_of_batch(model, batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        return random_sites(model), _replicated(model)

    results = run_ranks(on_rank, layout.ranks_per_replica, timeout=timeout, device=device)
    sites, weights = results[0]
    return sites, [name for name in weights if any(not torch.equal(weights[name], other[name]) for _, other in results)]


def _replicated(model: Any) -> dict[str, torch.Tensor]:
    state = parallel_state(model)
    assert state is not None
    return {
        name: local_tensor(parameter.detach()).to("cpu", copy=True)
        for name, parameter in own_parameters(model)
        if not state.placement(name).is_split
    }
