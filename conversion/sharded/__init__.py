"""This library's sharded checkpoints, which resume on every layout."""
