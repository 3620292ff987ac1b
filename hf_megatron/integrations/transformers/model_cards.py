"""Model cards on every save and push of a laid out model; `docs/model_cards.md` says what they hold.

The first rank alone writes, and what it writes needs nothing of the others. A card that cannot be written is a warning:
the weights beside it are worth more.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...core.communication.rank_errors import rank_and_size
from ...parallel_state import parallel_state


@contextmanager
def _warning(directory: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the save goes on
        warnings.warn(
            f"No model card was written to {directory}: {type(error).__name__}: {error}. Everything else was saved.",
            stacklevel=3,
        )


def write_model_card(model: Any, directory: Any, repo_id: str | None = None, **known: Any) -> None:
    """Writes the card of a model that `save_pretrained` has saved, on the first rank.

    Args:
        model (`PreTrainedModel`): laid out by this library.
        directory (`str` or `Path`): where it was saved.
        repo_id (`str`, *optional*): where it is going to be pushed.
        known: fields of `CardData` that the model does not say.
    """
    if rank_and_size(None)[0]:
        return
    with _warning(directory):
        from ...model_cards import card_data_from_model, write_card

        name = os.path.basename(os.path.abspath(directory) if repo_id is None else repo_id)
        # Folders that get their name later begin with a dot.
        known = {"model_name": None if name.startswith(".") else name, **known}
        if repo_id is not None and "/" in repo_id:
            known["model_id"] = repo_id
        write_card(directory, card_data_from_model(model, **known))


def write_trainer_card(trainer: Any, directory: Any, **known: Any) -> None:
    """Writes the card of what a Trainer has saved, with its log, on the first rank.

    `known` are fields of `CardData` that the trainer does not say, or that it says otherwise.
    """
    if rank_and_size(None)[0]:
        return
    with _warning(directory):
        from ...model_cards import card_data_from_trainer, write_card

        write_card(directory, card_data_from_trainer(trainer, **known))


def save(original: Callable, self: Any, output_dir: str | None = None, state_dict: dict | None = None) -> None:
    """Makes the model's card the trainer's, in `Trainer._save`, the part of `save_model` that writes."""
    original(self, output_dir, state_dict)
    if parallel_state(self.model) is not None:
        write_trainer_card(self, self.args.output_dir if output_dir is None else output_dir)


def create_model_card(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Writes our card with the arguments of `create_model_card` of Trainer or of TRL's trainers."""
    if parallel_state(self.model) is None:
        original(self, *args, **kwargs)
        return
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    write_trainer_card(self, self.args.output_dir, **_known(self, given))


def _known(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Turns arguments of `create_model_card` into fields of `CardData`; the rest stays as the trainer says."""

    from ...model_cards.provenance import base_of, is_id

    def listed(name: str) -> tuple[Any, ...]:
        value = given.get(name) or ()
        return (value,) if isinstance(value, str) else tuple(value)

    # Scripts hand on what they were started with, which may be a folder or a file here.
    origin = given.get("finetuned_from")
    datasets = tuple(filter(is_id, listed("dataset_tags") or listed("dataset_name")))
    known: dict[str, Any] = {
        "language": listed("language"),
        "license": given.get("license"),
        "model_name": given.get("model_name"),
        "base_model": origin if is_id(origin) else base_of(origin),
        # TRL's `dataset_name` goes into the metadata, as Trainer's `dataset_tags` do.
        "datasets": datasets,
        "dataset_names": tuple(name for name in listed("dataset") if not _is_local(name)),
    }
    if len(tasks := listed("tasks")) == 1:
        known["pipeline_tag"] = tasks[0]
    # Of several it is not known which one the metrics are of.
    if len(known["datasets"]) == 1 and trainer.eval_dataset is not None:
        known["evaluation_dataset"] = known["datasets"][0]
        known["evaluation_config"] = next(iter(listed("dataset_args")), None)
    if tags := listed("tags"):
        own = ("hf_megatron", "generated_from_trainer", *(trainer.model.model_tags or ()))
        known["tags"] = tuple(dict.fromkeys((*own, *tags)))
    return {name: value for name, value in known.items() if value not in (None, ())}


def _is_local(name: str) -> bool:
    """Tells whether what data is called, a path and a config's name maybe, is of this machine."""
    return any(os.path.isabs(name) or os.path.exists(name) for name in (name, name.split(" ")[0]))
