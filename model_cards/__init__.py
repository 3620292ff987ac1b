"""Model cards from what is known of a model, its training and its parity; ships as `hf_megatron.model_cards`."""

from .card import MARKER, carry_card, check_card, is_own_card, render, write_card
from .facts import CardData, Parity, card_data_from_model, facts_of_checkpoint, facts_of_config, recorded_parity
from .training import facts_of_trainer

__all__ = [
    "MARKER",
    "CardData",
    "Parity",
    "carry_card",
    "check_card",
    "facts_of_checkpoint",
    "facts_of_config",
    "card_data_from_model",
    "facts_of_trainer",
    "is_own_card",
    "recorded_parity",
    "render",
    "write_card",
]
