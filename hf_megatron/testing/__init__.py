"""Parity check of a model type: tiny models, forked ranks, tolerances and recorded results."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..core.fork_harness import run_ranks as run_ranks
    from ..core.layouts import parse_layouts as parse_layouts
    from .parity import check_tiny_model as check_tiny_model
    from .parity import make_tiny_model as make_tiny_model
    from .tolerances import judge as judge

_MODULES = {
    "check_tiny_model": "hf_megatron.testing.parity",
    "judge": "hf_megatron.testing.tolerances",
    "make_tiny_model": "hf_megatron.testing.parity",
    "parse_layouts": "hf_megatron.core.layouts",
    "run_ranks": "hf_megatron.core.fork_harness",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
