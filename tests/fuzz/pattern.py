"""Definition of a training-loop pattern."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LoopPattern:
    """Deviation of a training loop from the plain one, in its use of gradients, losses and weights.

    Attributes:
        name, description: as shown in the documentation.
        made, prepared, before_step, after_step, ended (`Callable`, *optional*): called with the loop at that point, in
            addition to the plain loop.
        forward, backward, step, clear (`Callable`, *optional*): called with the loop and replaces the plain
            implementation; `forward` also receives the batch, `backward` the loss.
        changes: fields to change in the model's config.
        batch: fields to change in the batch settings.
        acts: number of optimizer steps before the pattern acts; an error must be raised no later.
        loop: required kind of loop.
        needs: required features of the model: `"experts"`, `"causal"`, `"fp32"`, ...
        random: whether it draws random numbers, so that only ranks are compared with each other.
        local: whether the returned loss is this rank's term of a sum over the data-parallel ranks.
        slow: whether it takes seconds.
        trips: whether a single-process optimizer may raise after it although a prepared one continues.
        of_full: whether it needs the global loss, because its result is not a sum over local losses.
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
