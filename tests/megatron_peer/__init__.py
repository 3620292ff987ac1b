"""Real megatron-core models on CPU, as the peer of the Megatron checkpoint tests. See README.md."""
