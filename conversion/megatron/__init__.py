"""Megatron's names of tensors, what they mean, and how they correspond to those of a model."""
