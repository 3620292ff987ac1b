"""VibeVoice: tokenizers of sounds."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "vibevoice_acoustic_tokenizer_encoder",
    "vibevoice_acoustic_tokenizer",
    facts=TypeFacts(
        # Few samples of a token, and no noise on what is made of them: it is drawn for every microbatch.
        tiny={"downsampling_ratios": [2, 2], "depths": [1, 1, 1], "num_filters": 8, "vae_std": 0.0},
    ),
)
register_facts(
    "vibevoice_asr",
    facts=TypeFacts(
        no_gradient={r"_tokenizer_encoder\.": "makes latents of sounds without gradients"},
    ),
)
