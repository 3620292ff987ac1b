"""Megatron-Core's `torch_dist` checkpoints, read and written without Megatron."""
