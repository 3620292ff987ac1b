"""Debugging and profiling tools that locate the rank, layer, and operation of a problem."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..core.spans import SpanRecorder as SpanRecorder
    from ..core.spans import Timeline as Timeline
    from ..core.spans import bubble_share as bubble_share
    from .divergence import compare_recordings as compare_recordings
    from .hang import find_discords as find_discords
    from .hang import read_flight_records as read_flight_records
    from .memory_snapshot import MemorySnapshot as MemorySnapshot
    from .nonfinite import NonFiniteReport as NonFiniteReport
    from .nonfinite import NonFiniteWatch as NonFiniteWatch
    from .recording import StepRecorder as StepRecorder
    from .replica_check import ReplicaCheck as ReplicaCheck
    from .run_record import RunRecord as RunRecord
    from .run_record import read_run as read_run
    from .run_report import write_page as write_page
    from .step_memory import StepMemory as StepMemory
    from .step_memory import memory_in as memory_in
    from .step_trace import StepTrace as StepTrace
    from .stragglers import StragglerWatch as StragglerWatch
    from .throughput import ModelWork as ModelWork
    from .throughput import Throughput as Throughput
    from .throughput import estimate_model_work as estimate_model_work
    from .timeline import gather_timeline as gather_timeline
    from .timeline import to_perfetto as to_perfetto
    from .timeline import to_png as to_png
    from .timeline import write_pictures as write_pictures

_MODULES = {
    "MemorySnapshot": "hf_megatron.diagnostics.memory_snapshot",
    "ModelWork": "hf_megatron.diagnostics.throughput",
    "NonFiniteReport": "hf_megatron.diagnostics.nonfinite",
    "NonFiniteWatch": "hf_megatron.diagnostics.nonfinite",
    "ReplicaCheck": "hf_megatron.diagnostics.replica_check",
    "RunRecord": "hf_megatron.diagnostics.run_record",
    "SpanRecorder": "hf_megatron.core.spans",
    "StepMemory": "hf_megatron.diagnostics.step_memory",
    "StepRecorder": "hf_megatron.diagnostics.recording",
    "StepTrace": "hf_megatron.diagnostics.step_trace",
    "StragglerWatch": "hf_megatron.diagnostics.stragglers",
    "Throughput": "hf_megatron.diagnostics.throughput",
    "Timeline": "hf_megatron.core.spans",
    "bubble_share": "hf_megatron.core.spans",
    "compare_recordings": "hf_megatron.diagnostics.divergence",
    "find_discords": "hf_megatron.diagnostics.hang",
    "gather_timeline": "hf_megatron.diagnostics.timeline",
    "memory_in": "hf_megatron.diagnostics.step_memory",
    "read_flight_records": "hf_megatron.diagnostics.hang",
    "read_run": "hf_megatron.diagnostics.run_record",
    "to_perfetto": "hf_megatron.diagnostics.timeline",
    "to_png": "hf_megatron.diagnostics.timeline",
    "estimate_model_work": "hf_megatron.diagnostics.throughput",
    "write_page": "hf_megatron.diagnostics.run_report",
    "write_pictures": "hf_megatron.diagnostics.timeline",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
