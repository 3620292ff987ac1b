"""`torch.inference_mode()`: what is made inside may not be used in training, buffers that outlive a call neither."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def left_inference_mode() -> Iterator[None]:
    """Computes without gradients in the place of inference mode, where that is on."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
