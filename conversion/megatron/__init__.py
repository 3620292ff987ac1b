"""Megatron's tensor names, their meaning, and their mapping to a model's names."""
