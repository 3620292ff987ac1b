"""Real megatron-core models on CPU: the other side of the Megatron checkpoint tests. See README.md."""
