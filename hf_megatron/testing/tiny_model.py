"""Random parameters and batches of a tiny model that keep every feature of the original model active."""

import hashlib
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..models.type_facts import get_type_facts
from .tiny_config import _SPECIAL_TOKENS

# Supported tasks and the Auto class of each.
TASKS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "multiple_choice": "AutoModelForMultipleChoice",
    "image": "AutoModelForImageTextToText",
    # Videos in addition to images, or alone if a model takes either.
    "video": "AutoModelForImageTextToText",
    # Audio in addition to images, or alone.
    "audio": "AutoModelForMultimodalLM",
    # Encoder-decoders with one clip per sample.
    "speech": "AutoModelForSpeechSeq2Seq",
    # Base models; the loss is computed from their hidden states.
    "hidden_states": "AutoModel",
}


# Class that replaces a norm by an affine transform. With scales around 1 the residual stream would grow from block to
# block until attention selects single tokens.
_NO_NORM = "NoNorm"


def draw_parameters(model: nn.Module, seed: int = 0, *, trained_only: bool = False) -> None:
    """Draws every parameter, and every buffer that acts as one (such as a router's bias), at random and in place.

    The values depend on name, shape and seed only, never on the order of the parameters. The model must have the
    initial weights of its class: they distinguish a norm that scales by `weight` (drawn around 1) from one that scales
    by `1 + weight` (drawn around 0).
    """
    # A tied parameter is drawn once, for its first owner, the embedding.
    drawn: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            learned = isinstance(tensor, nn.Parameter) or name.endswith("bias") or name == "tid2eid"
            if not learned or tensor in drawn or (trained_only and not tensor.requires_grad):
                continue
            drawn.add(tensor)
            digest = hashlib.blake2b(f"{seed}:{prefix}.{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
            with torch.no_grad():
                tensor.copy_(_draw(module, name, tensor, generator))


def make_batch(
    config: PreTrainedConfig,
    *,
    batch_size: int = 3,
    sequence_length: int = 13,
    seed: int = 0,
    task: str = "causal",
    padding_side: str = "right",
) -> dict[str, Tensor]:
    """Returns a batch with padding in its last sequence and without any label in its second one.

    A single sequence is padded and labeled.

    Args:
        batch_size (`int`, defaults to 3): number of sequences.
        sequence_length (`int`, defaults to 13): tokens per sequence, including padding.
        seed (`int`, defaults to 0): seed of the tokens and labels.
        task (`str`, defaults to `"causal"`): task of the labels, a key of `TASKS`.
        padding_side (`str`, defaults to `"right"`): `"right"` or `"left"`.

    Returns:
        `dict[str, Tensor]`: `input_ids` and `attention_mask` of shape `[batch, sequence]`, and `labels` of the same
        shape, of `[batch, sequence - 2]` for `"seq2seq"` and of `[batch]` for `"classification"`; `start_positions` and
        `end_positions` of `[batch]` instead for `"question_answering"`; no labels for `"hidden_states"`. With
        `"multiple_choice"` tokens and mask are `[batch, choices, sequence]`, labels `[batch]`. Models with
        several kinds of token types get `token_type_ids` of `[batch, sequence, kinds]`. Models with several codebooks
        get `input_ids` of `[batch, codebooks, sequence]` and `labels` of `[batch, sequence, codebooks]`.
    """
    if task not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
    if padding_side not in ("right", "left"):
        raise ValueError(f'`padding_side` must be "right" or "left", got {padding_side!r}.')
    generator = torch.Generator().manual_seed(seed)
    tokens = plain_tokens(config)

    def draw_tokens(length: int) -> Tensor:
        return tokens[torch.randint(len(tokens), (batch_size, length), generator=generator)]

    input_ids = draw_tokens(sequence_length)
    attention_mask = torch.ones_like(input_ids)
    num_padding = sequence_length // 4
    padding = slice(sequence_length - num_padding, None) if padding_side == "right" else slice(0, num_padding)
    attention_mask[-1, padding] = 0
    pad_token_id: Any = getattr(config.get_text_config(), "pad_token_id", None)
    input_ids[attention_mask == 0] = 0 if pad_token_id is None else pad_token_id

    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    if sizes := getattr(config, "type_vocab_sizes", None):
        # Several token types per token. If all had the same value, attention gradients would nearly cancel.
        kinds = [torch.randint(size, input_ids.shape, generator=generator) for size in sizes]
        batch["token_type_ids"] = torch.stack(kinds, -1)
    if entities := getattr(config, "entity_vocab_size", None):
        batch |= _draw_entities(batch_size, entities, generator)
    if get_type_facts(config.model_type).reads_codebooks:
        # A codebook dim of its own: `[batch * codebooks, sequence]` could not be split into microbatches.
        books = [draw_tokens(sequence_length) for _ in range(cast(int, config.num_codebooks))]
        batch["input_ids"] = input_ids = torch.stack(books, 1)
        # Encoded prompts; the last token of the first one is masked.
        size = batch_size, 5, cast(int, config.hidden_size)
        batch["encoder_hidden_states"] = torch.randn(size, generator=generator)
        batch["encoder_attention_mask"] = (torch.arange(batch_size * 5) != 4).long().view(size[:2])
    if task == "hidden_states":
        return batch
    if task == "classification":
        num_labels = cast(int, config.num_labels)
        if config.is_encoder_decoder and config.eos_token_id is not None:
            # Encoder-decoders classify at the end-of-sequence token.
            last = attention_mask.cumsum(1).argmax(1)
            input_ids[torch.arange(batch_size), last] = config.eos_token_id
        first = torch.randint(num_labels, (1,), generator=generator)
        return batch | {"labels": (first + torch.arange(batch_size)) % num_labels}
    if task == "multiple_choice":
        choices = [input_ids, draw_tokens(sequence_length), draw_tokens(sequence_length)]
        batch |= {"input_ids": torch.stack(choices, 1), "attention_mask": torch.stack([attention_mask] * 3, 1)}
        return batch | {"labels": torch.arange(batch_size) % len(choices)}
    if task == "question_answering":
        starts = torch.randint(sequence_length // 2, (batch_size,), generator=generator)
        # An end beyond the sequence is ignored, as for a truncated context.
        ends = (starts + 2).where(torch.arange(batch_size) != 1, sequence_length)
        return batch | {"start_positions": starts, "end_positions": ends}
    # Decoder and encoder lengths differ, so that mixing them up fails.
    labels = draw_tokens(sequence_length - 2) if task == "seq2seq" else input_ids.clone()
    if task == "seq2seq":
        if get_type_facts(config.model_type).needs_decoder_inputs:
            batch["decoder_input_ids"] = labels.roll(1, 1)
        return batch | {"labels": mask_labels(labels, config, generator, padding=num_padding)}
    if task == "token_classification":
        labels = torch.randint(cast(int, config.num_labels), labels.shape, generator=generator)
    if get_type_facts(config.model_type).reads_codebooks:
        labels, attention_mask = labels.transpose(1, 2), attention_mask[..., None]
    ignored = torch.rand(labels.shape, generator=generator) < (0.6 if task == "masked" else 0.1)
    ignored |= attention_mask == 0
    if batch_size > 1:
        ignored[1] = True
        ignored[1, 0] &= not get_type_facts(config.model_type).needs_a_label
    return batch | {"labels": labels.masked_fill(ignored, -100)}


def _draw_entities(batch_size: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws three entities per sequence, of two or three tokens each; the last sequence has one entity and padding."""
    shape = (batch_size, 3)
    starts = torch.randint(6, shape, generator=generator)[..., None]
    positions = starts + torch.arange(3)
    positions[:, 1, -1] = -1
    mask = torch.ones(shape, dtype=torch.long)
    mask[-1, 1:] = 0
    return {
        "entity_ids": torch.randint(1, vocabulary, shape, generator=generator),
        "entity_attention_mask": mask,
        "entity_token_type_ids": torch.zeros(shape, dtype=torch.long),
        "entity_position_ids": positions,
    }


def mask_labels(labels: Tensor, config: PreTrainedConfig, generator: torch.Generator, *, padding: int) -> Tensor:
    """Masks random labels `[batch, sequence]`, the last `padding` labels of the last sequence and all of the second."""
    ignored = torch.rand(labels.shape, generator=generator) < 0.1
    ignored[-1, -padding:] = True
    if len(labels) > 1:
        ignored[1] = True
        ignored[1, 0] &= not get_type_facts(config.model_type).needs_a_label
    return labels.masked_fill(ignored, -100)


def _draw(module: nn.Module, name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Draws values for one tensor, scaled to keep activations around 1."""
    if name == "tid2eid":
        # Table of experts per token id, which must be distinct.
        num_tokens, top_k = tensor.shape
        return torch.rand(num_tokens, cast(int, module.num_experts), generator=generator).argsort(dim=-1)[:, :top_k]
    noise = torch.randn(tensor.shape, generator=generator)
    if isinstance(module, nn.Embedding):
        return 0.3 * noise
    if name.endswith(("correction_bias", "expert_bias")):
        # Small, because it is added to scores that differ by little.
        return 0.05 * noise
    if isinstance(module, nn.modules.conv._ConvNd) and name == "weight":
        # Small before a state space model, whose normalized output has large gradients where terms cancel.
        gain = 0.2 if module.groups > 1 else 1.0
        return gain * noise / tensor[0].numel() ** 0.5
    if name == "A_log":
        # Slow decay, so that the state covers several tokens.
        return 0.2 * noise - 1.0
    if "hc_mult" in vars(module) and tensor.dim() < 2:
        # Hyper-connections: with equal weights all streams would be identical and the weights' gradients round-off.
        return noise
    if tensor.dim() < 2:
        if name.endswith("bias"):
            return 0.1 * noise
        if type(module).__name__ == _NO_NORM:
            return 0.1 * noise + 0.8
        return 0.2 * noise + (1.0 if tensor.mean() > 0.5 else 0.0)
    # The gain makes attention prefer some tokens: uniform attention would hide position errors.
    return 1.2 * noise / tensor.shape[-1] ** 0.5


def plain_tokens(config: PreTrainedConfig) -> Tensor:
    """Returns the token ids without a special meaning (such as an image placeholder), a 1-D tensor."""
    special: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(_SPECIAL_TOKENS) and value is not None:
                special |= set(value) if isinstance(value, list) else {value}
    # Codes of tokenized images.
    special |= set((getattr(config, "vocabulary_map", None) or {}).values())
    text_config = config.get_text_config()
    num_tokens = getattr(text_config, "unpadded_vocab_size", None) or text_config.vocab_size
    return torch.tensor([token for token in range(num_tokens) if token not in special])
