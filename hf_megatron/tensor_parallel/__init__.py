"""Parallel linear, embedding and expert modules, sequence regions and the vocab-parallel loss."""
