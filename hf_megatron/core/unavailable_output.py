"""What stands in an output where a value was not kept."""

from typing import Any, ClassVar

from ..errors import UnsupportedError


class UnavailableOutput:
    """Raises `UnsupportedError` with its `message` however it is read: attributes, operators, torch's functions."""

    message: ClassVar[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("dtype", "to", "is_nested_tensor"):
            # What looks for tensors in whatever a model returned asks for these.
            raise _UnreadableAttribute(self.message)
        raise UnsupportedError(self.message)

    def _reject(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(self.message)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(cls.message)

    # Operators are looked up in the class.
    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __array__ = _reject
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _reject
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = _reject
    __lt__ = __le__ = __gt__ = __ge__ = _reject


class _UnreadableAttribute(UnsupportedError, AttributeError):
    """Lets `hasattr` answer no."""
