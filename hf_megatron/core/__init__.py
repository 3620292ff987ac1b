"""Mesh, axes, placements, off-stage tensors, collectives and file I/O: the layer every parallel axis builds on."""
