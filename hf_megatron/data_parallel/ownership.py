"""What a parameter itself tells of the model it belongs to: stock loops hand over parameters, not models."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from .engine import DataParallel
    from .reduction import GradientReducer

_MARK = "_hf_megatron"


class ParameterList:
    """The parameters of a model, found again on every forward without walking its modules.

    Moving a model, or a caller, may put another parameter under the same name; modules added later are found by `scan`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._holders: list[dict[str, nn.Parameter | None]] = []
        self.scan()

    def scan(self) -> None:
        self._holders = [module._parameters for module in self.model.modules() if module._parameters]

    def current(self) -> list[nn.Parameter]:
        """Each parameter once, in the order of `model.parameters()`."""
        found = {id(p): p for holder in self._holders for p in holder.values() if p is not None}
        return list(found.values())


def mark(parameter: nn.Parameter, engine: "DataParallel") -> None:
    setattr(parameter, _MARK, engine)


def engine_of(parameter: Tensor) -> "DataParallel | None":
    """The data parallel engine of the model a parameter belongs to, if it is one of ours."""
    return vars(parameter).get(_MARK)


def reducer_of(parameter: Tensor) -> "GradientReducer | None":
    """The reducer that takes a parameter's gradient out of `.grad`."""
    engine = engine_of(parameter)
    if engine is None or engine.reducer is None or not engine.reducer.owns(parameter):
        return None
    return engine.reducer
