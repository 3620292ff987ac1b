"""Batches of speech for a tiny encoder-decoder: a clip and the tokens of what is said for each row."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .audio_inputs import audio_inputs
from .tiny_model import labels_of_decoder, plain_tokens

_MASK = "attention_mask"
# What models raise for clips of another form than theirs.
_UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


def make_speech_batch(
    model: Any, *, batch_size: int = 3, sequence_length: int = 13, seed: int = 0
) -> dict[str, Tensor]:
    """Makes a batch of clips, of unequal lengths where the model takes a mask, without any label in its second row.

    Args:
        model (`PreTrainedModel`): of the class that users load.

    Returns:
        `dict[str, Tensor]`: the clips in the form that the model takes; `labels` of `[batch, sequence - 2]`.

    Raises:
        ValueError: a model that takes no clips in a known form.
    """
    generator = torch.Generator().manual_seed(seed)
    asked = {*inspect.signature(model.forward).parameters}
    tokens = plain_tokens(model.config)
    labels = tokens[torch.randint(len(tokens), (batch_size, sequence_length - 2), generator=generator)]
    labels = labels_of_decoder(labels, model.config, generator, padding=sequence_length // 4)
    if (books := getattr(model.config, "num_codebooks", None)) is not None:
        return _in_codebooks(model.config, books, labels, generator)
    problems: list[str] = []
    for clips in audio_inputs(model.config, asked, batch_size, generator, masks=(_MASK,)):
        batch = clips | {"labels": labels}
        try:
            _require_read(model, batch, next(iter(clips)))
        except _UNFIT as error:
            problems.append(str(error))
            continue
        return batch
    raise ValueError(f"{type(model).__name__} takes no clips in a known form: {'; '.join(problems)[:300]}")


def _in_codebooks(config: Any, books: int, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Makes clips that are tokens of several codebooks beside each token of text `[batch, sequence, 1 + books]`."""
    text = labels.where(labels >= 0, config.pad_token_id)
    audio_clips = torch.randint(config.codebook_vocab_size, (*labels.shape, books), generator=generator)
    return {"input_ids": torch.cat([text[..., None], audio_clips], dim=-1), "labels": labels}


@torch.no_grad()
def _require_read(model: Any, batch: dict[str, Tensor], name: str) -> None:
    """Compares the first row's logits with those of a quieter clip: a gradient here would end this process's forks."""
    model.eval()
    loud, quiet = (model(**{**batch, name: batch[name] * volume}).logits[0] for volume in (1.0, 0.5))
    if torch.equal(loud, quiet):
        raise ValueError("its logits do not depend on them")
