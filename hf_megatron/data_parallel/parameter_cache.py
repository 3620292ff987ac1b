"""The parameters of a model, found again on every forward without walking its modules."""

from torch import nn

from ..core.off_stage import is_off_stage


def _has_own(module: nn.Module) -> bool:
    return any(parameter is not None and not is_off_stage(parameter) for parameter in module._parameters.values())


class ParameterList:
    """The parameters that a model has at present.

    Moving a model, or a caller, may put another parameter under the same name; modules added later are found by `scan`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._holders: list[dict[str, nn.Parameter | None]] | None = None

    def scan(self) -> None:
        self._holders = [module._parameters for module in self.model.modules() if _has_own(module)]

    def current(self) -> list[nn.Parameter]:
        """Lists each parameter once, in the order of `model.parameters()`; of a pipeline this rank's."""
        if self._holders is None:
            self.scan()
        assert self._holders is not None
        values = (value for holder in self._holders for value in holder.values() if value is not None)
        # A head on the first stage may have the tied weight, and its bias elsewhere.
        found = {id(value): value for value in values if not is_off_stage(value)}
        return list(found.values())
