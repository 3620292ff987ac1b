"""Model cards generated from recorded parity results; ships as `hf_megatron.model_cards`."""
