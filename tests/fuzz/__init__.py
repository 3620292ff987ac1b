"""Fuzzer: random training loops of tiny models, compared with the single-process run."""
