"""Specs and `TypeFacts` of model families without a usable transformers plan, one small file per family."""
