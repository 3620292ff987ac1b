"""Model specs: the sharding of every model type, its registry, derivation and recorded parity results."""
