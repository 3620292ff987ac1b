"""Setting that the loss of a sequence classifier writes into the config, on the last stage only."""

from typing import Any

import torch.distributed as dist

from ..losses.targets import target_names
from .stage_runner import StageRunner


class ProblemType:
    """Copies `config.problem_type` from the last stage to the others, one of which saves the config.

    transformers sets it in the first call with labels, from their dtype; predictions of a saved model depend on it.
    """

    def __init__(self, model: Any, runner: StageRunner):
        self.config, self.runner = model.config, runner
        self._is_shared = False

    def awaits(self, arguments: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments may set it; identical on all ranks, if read before the call."""
        is_unset = getattr(self.config, "problem_type", None) is None
        return is_unset and not self._is_shared and bool(target_names(arguments))

    def share(self) -> None:
        """Broadcasts it from the last stage; once per model, as other models leave it unset. Collective."""
        values = [getattr(self.config, "problem_type", None)]
        group = self.runner.state.mesh.host_group("pp")
        dist.broadcast_object_list(values, group=group, group_src=self.runner.last_rank)
        if values[0] is not None:
            self.config.problem_type = values[0]
        self._is_shared = True
