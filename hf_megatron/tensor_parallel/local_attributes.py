"""This rank's share of what modules count: heads and widths, in attributes of their own or of a config they read."""

from collections.abc import Mapping
from typing import Any

from torch import nn

# Before what a module reads of its config.
OF_CONFIG = "config."


class LocalConfig:
    """Shows a config with this rank's share of some of its numbers to one module; all else is the config's own.

    A copy would no longer follow the config, as where a user chooses another attention function.
    """

    def __init__(self, unsharded: Any, sizes: Mapping[str, int]):
        vars(self).update(_unsharded=unsharded, _sizes=dict(sizes))

    def __getattr__(self, name: str) -> Any:
        return self._sizes[name] if name in self._sizes else getattr(self._unsharded, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._unsharded, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._unsharded, self._sizes)


def give_sizes(module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Sets a module's attributes; those of its config for the module alone."""
    of_config = {name.removeprefix(OF_CONFIG): size for name, size in sizes.items() if name.startswith(OF_CONFIG)}
    for name, size in sizes.items():
        if not name.startswith(OF_CONFIG):
            setattr(module, name, size)
    if of_config:
        # Names of other kinds are modules' and parameters'.
        module.config = LocalConfig(module.config, of_config)  # type: ignore[assignment]
