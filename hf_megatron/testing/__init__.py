"""Parity check of a model type: forked ranks, tiny models, tolerances and recorded results."""
