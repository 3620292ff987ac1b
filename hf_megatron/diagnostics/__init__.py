"""Tools that name the rank, layer and operation where a run misbehaves."""
