"""Pipeline schedules: registration, inspection and simulation."""

from typing import TYPE_CHECKING

from .core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .pipeline_parallel.schedule_simulator import SimulatedStep as SimulatedStep
    from .pipeline_parallel.schedule_simulator import StageCosts as StageCosts
    from .pipeline_parallel.schedule_simulator import bubble as bubble
    from .pipeline_parallel.schedule_simulator import simulate as simulate
    from .pipeline_parallel.schedule_simulator import simulated_timeline as simulated_timeline
    from .pipeline_parallel.schedules import Action as Action
    from .pipeline_parallel.schedules import Kind as Kind
    from .pipeline_parallel.schedules import Schedule as Schedule
    from .pipeline_parallel.schedules import check_schedule as check_schedule
    from .pipeline_parallel.schedules import rank_actions as rank_actions
    from .pipeline_parallel.schedules import register_schedule as register_schedule
    from .pipeline_parallel.schedules import schedule as schedule
    from .pipeline_parallel.schedules import valid_microbatches as valid_microbatches

_MODULES = {
    "Action": "hf_megatron.pipeline_parallel.schedules",
    "Kind": "hf_megatron.pipeline_parallel.schedules",
    "Schedule": "hf_megatron.pipeline_parallel.schedules",
    "SimulatedStep": "hf_megatron.pipeline_parallel.schedule_simulator",
    "StageCosts": "hf_megatron.pipeline_parallel.schedule_simulator",
    "bubble": "hf_megatron.pipeline_parallel.schedule_simulator",
    "check_schedule": "hf_megatron.pipeline_parallel.schedules",
    "rank_actions": "hf_megatron.pipeline_parallel.schedules",
    "register_schedule": "hf_megatron.pipeline_parallel.schedules",
    "schedule": "hf_megatron.pipeline_parallel.schedules",
    "simulate": "hf_megatron.pipeline_parallel.schedule_simulator",
    "simulated_timeline": "hf_megatron.pipeline_parallel.schedule_simulator",
    "valid_microbatches": "hf_megatron.pipeline_parallel.schedules",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
