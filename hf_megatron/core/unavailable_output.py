"""Placeholder for an output that was not computed; reading it raises."""

from typing import Any, ClassVar

from ..errors import UnsupportedError


class UnavailableOutput:
    """Placeholder that raises `UnsupportedError` with `message` on any attribute, operator or torch function."""

    message: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("dtype", "to", "is_nested_tensor"):
            # Code that searches a model's output for tensors probes these attributes with `hasattr`.
            raise _UnreadableAttribute(self.message)
        raise UnsupportedError(self.message)

    def _reject(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(self.message)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(cls.message)

    # Python looks up operators on the class.
    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __array__ = _reject
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _reject
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = _reject
    __lt__ = __le__ = __gt__ = __ge__ = _reject


class _UnreadableAttribute(UnsupportedError, AttributeError):
    """Error that makes `hasattr` return False."""
