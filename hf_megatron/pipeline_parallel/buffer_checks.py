"""Check for modules that change their buffers in each forward, which a pipeline calls once for each microbatch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.off_stage import is_off_stage
from ..errors import UnsupportedError
from ..losses.loss_terms import CHECKED_CALLS


class BufferCheck(Shared):
    """Compares the version counters of a model's buffers before and after its first training forwards."""

    def __init__(self, model: nn.Module):
        self.model, self.calls = model, 0

    @contextmanager
    def watching(self, num_microbatches: int) -> Iterator[None]:
        """Raises `UnsupportedError` after the forwards of several microbatches inside have changed a buffer.

        A single process changes it once for the full batch, as old-style `torch.nn.utils.spectral_norm` does.
        """
        if num_microbatches == 1 or self.calls == CHECKED_CALLS:
            yield
            return
        self.calls += 1
        buffers = self._list_buffers()
        before = {name: buffer._version for name, buffer in buffers.items()}
        yield
        present = self._list_buffers()
        for name, version in before.items():
            # Buffers that were exchanged for others, such as frequencies for longer sequences, depend on no call count.
            if present.get(name) is buffers[name] and buffers[name]._version - version >= num_microbatches:
                raise UnsupportedError(
                    f"{name} is changed in each forward, and a pipeline calls its module once for each of "
                    f"{num_microbatches} microbatches: a single process changes it once per batch. Set "
                    "num_microbatches=1 or pp_size=1."
                )

    def _list_buffers(self) -> dict[str, Tensor]:
        """Returns this stage's buffers, of any shape, without the frequencies that follow the batch's length."""
        return {
            f"{name}.{buffer_name}".removeprefix("."): buffer
            for name, module in self.model.named_modules()
            if "rope_type" not in vars(module)
            for buffer_name, buffer in module.named_buffers(recurse=False)
            if not is_off_stage(buffer)
        }
