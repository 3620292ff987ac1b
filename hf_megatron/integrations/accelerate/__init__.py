"""Accelerate: plugin, launch, Accelerator methods and data loaders."""
