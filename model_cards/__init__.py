"""Model cards from data of a model, its training and its parity results; ships as `hf_megatron.model_cards`."""

from .card import MARKER, carry_card, check_card, is_own_card, render, write_card
from .card_data import (
    CardData,
    Parity,
    card_data_from_checkpoint,
    card_data_from_config,
    card_data_from_model,
    recorded_parity,
)
from .training import card_data_from_trainer

__all__ = [
    "MARKER",
    "CardData",
    "Parity",
    "carry_card",
    "check_card",
    "card_data_from_checkpoint",
    "card_data_from_config",
    "card_data_from_model",
    "card_data_from_trainer",
    "is_own_card",
    "recorded_parity",
    "render",
    "write_card",
]
