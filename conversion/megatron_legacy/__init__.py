"""Megatron's legacy `torch` format: a folder `mp_rank_*` for each rank."""
