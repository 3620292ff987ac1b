"""Megatron indexed datasets, sample order, blends and streams."""
