"""Whether ranks stay alike while a model draws random numbers: its dropout and jitter on, ranks seeded differently."""

import re
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..errors import RankError
from ..integrations.gate import ConfigUnderTest
from ..parallel_state import parallel_state
from ..registry.features import is_rate, random_sites
from ..upstream import local_tensor
from .parity import Twin
from .ranks import first_reason, run_ranks

_STEPS = 3
_RATE = 0.1


# All rates, then those of elements only: whole layers that are left out stop some layouts with an error.
_ATTEMPTS = ("", r"layerdrop|jitter|noise")


def set_rates(config: PreTrainedConfig, rate: float, but: str = "") -> None:
    """Sets every rate of a config and of its parts, except for names that match `but`."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            set_rates(value, rate, but)
        elif is_rate(name, value) and not (but and re.search(but, name)):
            setattr(config, name, rate)


def check_draws(twin: Twin, layout: MegatronConfig, *, timeout: float = 120.0) -> tuple[frozenset[str], str]:
    """Trains the twin with its rates on, and ranks that were seeded differently.

    Returns:
        the sites that drew random numbers while all replicated weights stayed bit-equal over the ranks, and what went
        wrong where not all of them did.
    """
    problems = []
    for but in _ATTEMPTS:
        try:
            sites, apart = _train(twin, layout, but, timeout)
        except RankError as error:
            problems.append(first_reason(str(error)))
            continue
        if not apart:
            return sites, "; ".join(problems)
        problems.append(f"replicated weights differ between ranks: {', '.join(apart[:3])}")
    return frozenset(), "; ".join(problems)


def _train(twin: Twin, layout: MegatronConfig, but: str, timeout: float) -> tuple[frozenset[str], list[str]]:
    """Returns where the twin drew random numbers, and the replicated weights that differ afterwards."""
    config = twin.model_on_meta().config
    set_rates(config, _RATE, but)
    under_test = ConfigUnderTest(**layout.to_dict())

    def on_rank() -> tuple[frozenset[str], dict[str, torch.Tensor]]:
        model = twin.load(config=config, megatron_config=under_test)
        torch.manual_seed(dist.get_rank())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(_STEPS):
            for batch in twin.batches:
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return random_sites(model), _replicated(model)

    results = run_ranks(on_rank, layout.ranks_per_replica, timeout=timeout)
    sites, weights = results[0]
    return sites, [name for name in weights if any(not torch.equal(weights[name], other[name]) for _, other in results)]


def _replicated(model: Any) -> dict[str, torch.Tensor]:
    state = parallel_state(model)
    assert state is not None
    return {
        name: local_tensor(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
        if not state.placement(name).is_split
    }
