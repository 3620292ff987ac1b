"""Activation memory: recomputation, offload, tiled MLPs and saved-tensor hooks."""
