"""Sharded checkpoints: save, load, resharding, async save and merged export."""
