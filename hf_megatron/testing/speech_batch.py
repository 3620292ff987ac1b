"""Speech batches for a tiny model: one clip and its transcript tokens per sample."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .audio_inputs import audio_inputs
from .tiny_model import mask_labels, plain_tokens

_MASK = "attention_mask"
# Exceptions that models raise for clips in an unsupported format.
_UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


def make_speech_batch(
    model: Any, *, batch_size: int = 3, sequence_length: int = 13, seed: int = 0
) -> dict[str, Tensor]:
    """Returns a batch of clips, of unequal lengths if the model takes a mask; the second sample has no labels.

    Args:
        model (`PreTrainedModel`): an instance of the class that users load.
        batch_size (`int`, defaults to 3): number of samples.
        sequence_length (`int`, defaults to 13): number of labels per sample plus 2.
        seed (`int`, defaults to 0): seed of clips and labels.

    Returns:
        `dict[str, Tensor]`: the clips in the format of the model, and `labels` of `[batch, sequence - 2]`.

    Raises:
        ValueError: the model does not accept any known format of clips.
    """
    generator = torch.Generator().manual_seed(seed)
    argument_names = {*inspect.signature(model.forward).parameters}
    tokens = plain_tokens(model.config)
    labels = tokens[torch.randint(len(tokens), (batch_size, sequence_length - 2), generator=generator)]
    labels = mask_labels(labels, model.config, generator, padding=sequence_length // 4)
    if (books := getattr(model.config, "num_codebooks", None)) is not None:
        return _in_codebooks(model.config, books, labels, generator)
    problems: list[str] = []
    for clips in audio_inputs(model.config, argument_names, batch_size, generator, masks=(_MASK,)):
        batch = clips | {"labels": labels}
        try:
            _require_read(model, batch, next(iter(clips)))
        except _UNFIT as error:
            problems.append(str(error))
            continue
        return batch
    raise ValueError(f"{type(model).__name__} accepts no clips in a known format: {'; '.join(problems)[:300]}")


def _in_codebooks(config: Any, books: int, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Returns a batch of text and codebook tokens per position, `input_ids` of `[batch, sequence, 1 + books]`."""
    text = labels.where(labels >= 0, config.pad_token_id)
    codes = torch.randint(config.codebook_vocab_size, (*labels.shape, books), generator=generator)
    return {"input_ids": torch.cat([text[..., None], codes], dim=-1), "labels": labels}


@torch.no_grad()
def _require_read(model: Any, batch: dict[str, Tensor], name: str) -> None:
    """Raises `ValueError` if the first sample's logits ignore the clip's volume.

    Compares two forwards because a backward in this process would break later forks.
    """
    model.eval()
    loud, quiet = (model(**{**batch, name: batch[name] * volume}).logits[0] for volume in (1.0, 0.5))
    if torch.equal(loud, quiet):
        raise ValueError("its logits do not depend on them")
