"""Megatron indexed datasets, sample order, blends, and streams."""

from typing import TYPE_CHECKING

from ..core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .blended import BlendedDataset as BlendedDataset
    from .build import build_pair as build_pair
    from .indexed import IndexedDataset as IndexedDataset
    from .indexed import token_dtype as token_dtype
    from .indexed_writer import IndexedWriter as IndexedWriter
    from .masked import BertDataset as BertDataset
    from .masked import T5Dataset as T5Dataset
    from .masking import Masking as Masking
    from .megatron_arguments import datasets_from_megatron_args as datasets_from_megatron_args
    from .ordered_dataset import WithoutSamples as WithoutSamples
    from .pretraining import PretrainingDataset as PretrainingDataset
    from .ramp_up import BatchRampUp as BatchRampUp
    from .sample_index import blend_order as blend_order
    from .sample_index import count_blend_samples as count_blend_samples
    from .sample_index import list_split_documents as list_split_documents
    from .sample_index import parse_split as parse_split
    from .sample_index import sample_order as sample_order
    from .schedules import MegatronScheduler as MegatronScheduler
    from .schedules import schedule_from_megatron_args as schedule_from_megatron_args
    from .streams import SampleStream as SampleStream
    from .table_datasets import build_table as build_table

_MODULES = {
    "BatchRampUp": "hf_megatron.datasets.ramp_up",
    "BertDataset": "hf_megatron.datasets.masked",
    "BlendedDataset": "hf_megatron.datasets.blended",
    "IndexedDataset": "hf_megatron.datasets.indexed",
    "IndexedWriter": "hf_megatron.datasets.indexed_writer",
    "Masking": "hf_megatron.datasets.masking",
    "MegatronScheduler": "hf_megatron.datasets.schedules",
    "PretrainingDataset": "hf_megatron.datasets.pretraining",
    "SampleStream": "hf_megatron.datasets.streams",
    "T5Dataset": "hf_megatron.datasets.masked",
    "WithoutSamples": "hf_megatron.datasets.ordered_dataset",
    "blend_order": "hf_megatron.datasets.sample_index",
    "build_pair": "hf_megatron.datasets.build",
    "datasets_from_megatron_args": "hf_megatron.datasets.megatron_arguments",
    "list_split_documents": "hf_megatron.datasets.sample_index",
    "parse_split": "hf_megatron.datasets.sample_index",
    "sample_order": "hf_megatron.datasets.sample_index",
    "count_blend_samples": "hf_megatron.datasets.sample_index",
    "schedule_from_megatron_args": "hf_megatron.datasets.schedules",
    "build_table": "hf_megatron.datasets.table_datasets",
    "token_dtype": "hf_megatron.datasets.indexed",
}
__all__ = sorted(_MODULES)
__getattr__, __dir__ = lazy_exports(__name__, _MODULES)
