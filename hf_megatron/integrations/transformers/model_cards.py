"""Model cards written on every save and push of a parallelized model; see `docs/model_cards.md` for their content.

Only the first rank writes, without communication. A card that cannot be written only causes a warning, because the
weights saved with it matter more.
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
    except Exception as error:  # noqa: BLE001 - any failure only warns, the save continues
        warnings.warn(
            f"No model card was written to {directory}: {type(error).__name__}: {error}. Everything else was saved.",
            stacklevel=3,
        )


def write_model_card(model: Any, directory: Any, repo_id: str | None = None, **known: Any) -> None:
    """Writes the card of a model saved by `save_pretrained`, on the first rank.

    Args:
        model (`PreTrainedModel`): a parallelized model.
        directory (`str` or `Path`): folder that the model was saved to.
        repo_id (`str`, *optional*): repository that the folder is going to be pushed to.
        known: fields of `CardData` that cannot be derived from the model.
    """
    if rank_and_size(None)[0]:
        return
    with _warning(directory):
        from ...model_cards import card_data_from_model, write_card

        name = os.path.basename(os.path.abspath(directory) if repo_id is None else repo_id)
        # Folders that are renamed into place when complete start with a dot.
        known = {"model_name": None if name.startswith(".") else name, **known}
        if repo_id is not None and "/" in repo_id:
            known["model_id"] = repo_id
        write_card(directory, card_data_from_model(model, **known))


def write_trainer_card(trainer: Any, directory: Any, **known: Any) -> None:
    """Writes the card of a model saved by a Trainer, including its log history, on the first rank.

    `known` holds fields of `CardData` that cannot be derived from the trainer, or that override it.
    """
    if rank_and_size(None)[0]:
        return
    with _warning(directory):
        from ...model_cards import card_data_from_trainer, write_card

        write_card(directory, card_data_from_trainer(trainer, **known))


def save(original: Callable, self: Any, output_dir: str | None = None, state_dict: dict | None = None) -> None:
    """Replaces the model's card by the trainer's in `Trainer._save`, the step of `save_model` that writes files."""
    original(self, output_dir, state_dict)
    if parallel_state(self.model) is not None:
        write_trainer_card(self, self.args.output_dir if output_dir is None else output_dir)


def create_model_card(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Writes this library's card from the arguments of `create_model_card`, of Trainer or of a TRL trainer."""
    if parallel_state(self.model) is None:
        original(self, *args, **kwargs)
        return
    arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
    write_trainer_card(self, self.args.output_dir, **_known(self, arguments))


def _known(trainer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Converts arguments of `create_model_card` to fields of `CardData`; all other fields come from the trainer."""

    from ...model_cards.provenance import find_base_model, is_id

    def listed(name: str) -> tuple[Any, ...]:
        value = arguments.get(name) or ()
        return (value,) if isinstance(value, str) else tuple(value)

    # Scripts pass on their own arguments, so the origin may be a local folder or file instead of a Hub id.
    origin = arguments.get("finetuned_from")
    datasets = tuple(filter(is_id, listed("dataset_tags") or listed("dataset_name")))
    known: dict[str, Any] = {
        "language": listed("language"),
        "license": arguments.get("license"),
        "model_name": arguments.get("model_name"),
        "base_model": origin if is_id(origin) else find_base_model(origin),
        # TRL's `dataset_name` goes into the metadata, as Trainer's `dataset_tags` does.
        "datasets": datasets,
        "dataset_names": tuple(name for name in listed("dataset") if not _is_local(name)),
    }
    if len(tasks := listed("tasks")) == 1:
        known["pipeline_tag"] = tasks[0]
    # With several datasets it is unknown which one the metrics belong to.
    if len(known["datasets"]) == 1 and trainer.eval_dataset is not None:
        known["evaluation_dataset"] = known["datasets"][0]
        known["evaluation_config"] = next(iter(listed("dataset_args")), None)
    if tags := listed("tags"):
        base_tags = ("hf_megatron", "generated_from_trainer", *(trainer.model.model_tags or ()))
        known["tags"] = tuple(dict.fromkeys((*base_tags, *tags)))
    return {name: value for name, value in known.items() if value not in (None, ())}


def _is_local(name: str) -> bool:
    """Returns whether a dataset name (a path, possibly followed by a config name) refers to this machine."""
    return any(os.path.isabs(name) or os.path.exists(name) for name in (name, name.split(" ")[0]))
