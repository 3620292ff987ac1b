"""Gradients across ranks: their norm and clipping."""
