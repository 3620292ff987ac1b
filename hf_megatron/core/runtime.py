"""Runtime state of the process: parallelized models, meshes, the launched layout and the current sequence context.

models      parallelized models that still exist, in the order they were loaded
meshes      process groups of this job's layouts, shared by models of one layout
launch      parallelizes the models of a script that does not pass `megatron_config`
context     the module whose forward splits the sequence over cp
"""

import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Runtime:
    """Models, meshes, launched layout and sequence context of the process."""

    meshes: dict[Any, Any] = field(default_factory=dict)
    launch: Any = None
    context: Any = None
    _models: list[weakref.ref] = field(default_factory=list)

    @property
    def models(self) -> list[Any]:
        """The laid out models that still exist, the last one loaded last."""
        return [model for model in (reference() for reference in self._models) if model is not None]

    def add_model(self, model: Any) -> None:
        """Takes note of a laid out model, for as long as it exists."""
        self._models = [weakref.ref(other) for other in (*self.models, model)]


RUNTIME = Runtime()
