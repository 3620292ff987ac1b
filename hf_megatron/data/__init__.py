"""Megatron's indexed datasets and the order of their samples; imports nothing of the parallel code."""
