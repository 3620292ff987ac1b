"""Trainer callbacks."""

from typing import TYPE_CHECKING

from .core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .integrations.trainer.callbacks.expert_load import ExpertLoadCallback as ExpertLoadCallback
    from .integrations.trainer.callbacks.replicas import ReplicaCallback as ReplicaCallback
    from .integrations.trainer.callbacks.run import RunCallback as RunCallback
    from .integrations.trainer.callbacks.throughput import ThroughputCallback as ThroughputCallback
    from .integrations.trainer.callbacks.timeline import TimelineCallback as TimelineCallback
    from .integrations.trainer.callbacks.traces import TraceCallback as TraceCallback
    from .integrations.trainer.callbacks.watches import MemoryCallback as MemoryCallback
    from .integrations.trainer.callbacks.watches import NonFiniteCallback as NonFiniteCallback
    from .integrations.trainer.callbacks.watches import RecordStepCallback as RecordStepCallback
    from .integrations.trainer.callbacks.watches import StragglerCallback as StragglerCallback
    from .integrations.trainer.termination import TerminationCallback as TerminationCallback

_MODULES = {
    "ExpertLoadCallback": "hf_megatron.integrations.trainer.callbacks.expert_load",
    "MemoryCallback": "hf_megatron.integrations.trainer.callbacks.watches",
    "NonFiniteCallback": "hf_megatron.integrations.trainer.callbacks.watches",
    "RecordStepCallback": "hf_megatron.integrations.trainer.callbacks.watches",
    "ReplicaCallback": "hf_megatron.integrations.trainer.callbacks.replicas",
    "RunCallback": "hf_megatron.integrations.trainer.callbacks.run",
    "StragglerCallback": "hf_megatron.integrations.trainer.callbacks.watches",
    "TerminationCallback": "hf_megatron.integrations.trainer.termination",
    "ThroughputCallback": "hf_megatron.integrations.trainer.callbacks.throughput",
    "TimelineCallback": "hf_megatron.integrations.trainer.callbacks.timeline",
    "TraceCallback": "hf_megatron.integrations.trainer.callbacks.traces",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
