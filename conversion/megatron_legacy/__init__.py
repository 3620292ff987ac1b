"""Megatron's legacy `torch` format: one `mp_rank_*` folder per rank."""
