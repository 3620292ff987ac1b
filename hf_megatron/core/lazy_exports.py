"""Lazy exports of a public package: a name's module is imported when the name is first accessed."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package whose public names are defined in other modules.

    Args:
        package (`str`): `__name__` of the package.
        modules (`Mapping[str, str]`): public name -> the module that defines it.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    def list_names() -> list[str]:
        return sorted(modules)

    return get_attribute, list_names
