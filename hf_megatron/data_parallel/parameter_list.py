"""The parameters of a model, found again on every forward without walking its modules."""

from torch import nn


class ParameterList:
    """The parameters that a model has at present.

    Moving a model, or a caller, may put another parameter under the same name; modules added later are found by `scan`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._holders: list[dict[str, nn.Parameter | None]] | None = None

    def scan(self) -> None:
        self._holders = [module._parameters for module in self.model.modules() if module._parameters]

    def current(self) -> list[nn.Parameter]:
        """Lists each parameter once, in the order of `model.parameters()`."""
        if self._holders is None:
            self.scan()
        assert self._holders is not None
        found = {id(p): p for holder in self._holders for p in holder.values() if p is not None}
        return list(found.values())
