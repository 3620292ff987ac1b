"""Distributed checkpoints of torch, transformers and Accelerate, under the model's names in memory."""
