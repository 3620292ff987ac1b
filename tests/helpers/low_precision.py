"""Error measure of low-precision runs."""

import torch

from hf_megatron.testing.measure import Measurement


def reference_error(a: Measurement, b: Measurement) -> float:
    """Returns the root mean square gradient error of `a` relative to `b`, usually a low-precision and an fp32 run."""
    squared, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for name, gradient in b.gradients.items():
        other = a.gradients[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            squared += (other.double() - gradient.double()).pow(2).sum()
            total += gradient.double().pow(2).sum()
    return (squared / total).sqrt().item()
