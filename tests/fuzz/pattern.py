"""What a habit of a training loop is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LoopPattern:
    """What a loop may do to gradients and weights.

    Attributes:
        name, description: as the documents say it.
        made, prepared, before_step, after_step, ended (`Callable`, *optional*): called with the loop, in addition.
        forward, backward, step, clear (`Callable`, *optional*): called with the loop in place of the plain way, the
            first also with a batch, the second also with the loss.
        changes: of the model's config.
        batch: of the batches.
        acts: steps that have changed weights when the habit acts: a refusal comes no later.
        loop: the kind of loop it needs.
        needs: what the model has to have: `"experts"`, `"causal"`, `"fp32"`, ...
        random: draws random numbers, so that only the ranks are compared with each other.
        local: the loss it returns is this rank's part of a sum over the data parallel ranks.
        slow: takes seconds.
        trips: one process's own optimizer may raise after it, where a prepared one goes on.
        of_full: what it makes of the loss is not made of parts of it.
    """

    name: str
    description: str
    made: Callable[[Any], None] | None = None
    prepared: Callable[[Any], None] | None = None
    forward: Callable[[Any, dict[str, Tensor]], Tensor] | None = None
    backward: Callable[[Any, Tensor], None] | None = None
    before_step: Callable[[Any], None] | None = None
    step: Callable[[Any], None] | None = None
    clear: Callable[[Any], None] | None = None
    after_step: Callable[[Any], None] | None = None
    ended: Callable[[Any], None] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    acts: int = 0
    loop: str = ""
    needs: tuple[str, ...] = ()
    random: bool = False
    local: bool = False
    slow: bool = False
    trips: bool = False
    of_full: bool = False
