"""PEFT adapters on sharded modules."""
