"""Converters between checkpoint formats; ships as `hf_megatron.conversion`.

`convert` moves weights and optimizer moments between Hugging Face folders, the library's sharded checkpoints,
Megatron-Core's `torch_dist`, Megatron's legacy `torch` and torch DCP; `compare` compares any two of them. Neither needs
Megatron, a GPU, or memory for more than a few tensors.
"""

from .compare import Comparison
from .convert import Report, convert, plan_conversion
from .interfaces import TargetOptions
from .open_pair import compare

__all__ = ["Comparison", "TargetOptions", "Report", "compare", "convert", "plan_conversion"]
