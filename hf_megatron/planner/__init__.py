"""Memory and time model of a parallel run, layout search and dry run."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .candidates import Bounds as Bounds
    from .devices import Device as Device
    from .devices import device as device
    from .devices import device_names as device_names
    from .devices import read_device as read_device
    from .devices import write_device as write_device
    from .estimate import Estimate as Estimate
    from .job import Job as Job
    from .plan_output import plan_as_dict as plan_as_dict
    from .plan_output import plan_as_text as plan_as_text
    from .plan_output import write_plan as write_plan
    from .predicted_step import dry_run as dry_run
    from .search import SearchResult as SearchResult
    from .search import search_layouts as search_layouts
    from .time_model import STOCK as STOCK
    from .time_model import Efficiency as Efficiency
    from .time_model import Times as Times
    from .time_model import seconds as seconds
    from .unit_work import Work as Work

_MODULES = {
    "Bounds": "hf_megatron.planner.candidates",
    "Device": "hf_megatron.planner.devices",
    "Efficiency": "hf_megatron.planner.time_model",
    "Estimate": "hf_megatron.planner.estimate",
    "Job": "hf_megatron.planner.job",
    "STOCK": "hf_megatron.planner.time_model",
    "SearchResult": "hf_megatron.planner.search",
    "Times": "hf_megatron.planner.time_model",
    "Work": "hf_megatron.planner.unit_work",
    "device": "hf_megatron.planner.devices",
    "device_names": "hf_megatron.planner.devices",
    "dry_run": "hf_megatron.planner.predicted_step",
    "plan_as_dict": "hf_megatron.planner.plan_output",
    "plan_as_text": "hf_megatron.planner.plan_output",
    "read_device": "hf_megatron.planner.devices",
    "search_layouts": "hf_megatron.planner.search",
    "seconds": "hf_megatron.planner.time_model",
    "write_device": "hf_megatron.planner.devices",
    "write_plan": "hf_megatron.planner.plan_output",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
