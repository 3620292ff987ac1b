"""Low-rank adapters between PEFT's files and Megatron-Bridge's checkpoints."""

from .convert import convert_adapter

__all__ = ["convert_adapter"]
