"""What names the rank, the layer and the operation where a run misbehaves."""
