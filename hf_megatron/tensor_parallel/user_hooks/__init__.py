"""User forward hooks on modules with sharded activations."""
