"""The library's own sharded checkpoints, which resume on every layout."""
