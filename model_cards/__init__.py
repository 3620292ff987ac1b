"""Model cards from what is known of a model, its training and its parity; ships as `hf_megatron.model_cards`."""

from .card import MARKER, carry_card, check_card, is_own_card, render, write_card
from .facts import CardFacts, Parity, facts_of_checkpoint, facts_of_config, facts_of_model, recorded_parity
from .training import facts_of_trainer

__all__ = [
    "MARKER",
    "CardFacts",
    "Parity",
    "carry_card",
    "check_card",
    "facts_of_checkpoint",
    "facts_of_config",
    "facts_of_model",
    "facts_of_trainer",
    "is_own_card",
    "recorded_parity",
    "render",
    "write_card",
]
