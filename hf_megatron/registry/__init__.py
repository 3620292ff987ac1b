"""Which parallel plan belongs to which model type: own families first, else derived from transformers' plans."""

from .derive import derive_spec
from .lookup import REGISTRY, own_spec, register_model, registered_types, spec_for

__all__ = ["REGISTRY", "derive_spec", "own_spec", "register_model", "registered_types", "spec_for"]
