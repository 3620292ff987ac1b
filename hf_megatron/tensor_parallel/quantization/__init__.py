"""4-bit and 8-bit frozen base weights, quantized per shard."""
