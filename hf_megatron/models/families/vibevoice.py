"""VibeVoice: audio tokenizers."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "vibevoice_acoustic_tokenizer_encoder",
    "vibevoice_acoustic_tokenizer",
    facts=TypeFacts(
        # Few waveform samples per token, and no latent noise, which would be drawn anew for each microbatch.
        tiny={"downsampling_ratios": [2, 2], "depths": [1, 1, 1], "num_filters": 8, "vae_std": 0.0},
    ),
)
register_facts(
    "vibevoice_asr",
    facts=TypeFacts(
        no_gradient={r"_tokenizer_encoder\.": "makes latents of sounds without gradients"},
    ),
)
