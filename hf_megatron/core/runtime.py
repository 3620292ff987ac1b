"""Process-wide runtime state: parallelized models, meshes, the launched layout and the current sequence context.

models      existing parallelized models, in the order in which they were loaded
meshes      meshes of this job's layouts, shared by models of one layout
launch      parallelizes the models of a script that does not pass `megatron_config`
context     the module whose forward shards the sequence over cp
context_masks, attention_graphs
            masks and autograd graphs that compiled attention over split sequences refers to by number
awaits_backward, has_warned_of_collective
            whether a script's collectives are watched now, and whether one was reported (`torch/default_group.py`)
unprepared_step
            class of an optimizer that steps on shards without being prepared, while it does
fake_job    process group and device type of a job whose other ranks do not exist (`testing/fake_rank.py`)
"""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def keep_by_number(table: dict[int, Any], number: "Tensor", value: Any) -> None:
    """Keeps a value in a table while the memory of its key exists, an integer in a tensor of one element."""
    key = int(number)
    table[key] = value
    weakref.finalize(number.untyped_storage(), table.pop, key, None)


@dataclass
class Runtime:
    """Models, meshes, launched layout and sequence context of the process."""

    meshes: dict[Any, Any] = field(default_factory=dict)
    launch: Any = None
    context: Any = None
    context_masks: dict[int, Any] = field(default_factory=dict)
    attention_graphs: dict[int, Any] = field(default_factory=dict)
    awaits_backward: bool = False
    has_warned_of_collective: bool = False
    unprepared_step: str | None = None
    fake_job: tuple[Any, str] | None = None
    _models: list[weakref.ref] = field(default_factory=list)

    @property
    def models(self) -> list[Any]:
        """Existing parallelized models; the most recently loaded one is last."""
        return [model for model in (reference() for reference in self._models) if model is not None]

    def add_model(self, model: Any) -> None:
        """Registers a parallelized model by weak reference."""
        self._models = [weakref.ref(other) for other in (*self.models, model)]


RUNTIME = Runtime()
