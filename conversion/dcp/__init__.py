"""Distributed checkpoints of torch, of transformers and of Accelerate, under the model's names in memory."""
