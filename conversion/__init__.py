"""Converters between checkpoint layouts; ships as `hf_megatron.conversion`.

So far only merged Hugging Face files are written, by `hf_megatron.checkpoint.merged`.
"""
