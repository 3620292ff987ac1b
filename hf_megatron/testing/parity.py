"""Parity case: a tiny model in a single process against the same model on several ranks."""

import functools
import math
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..core.fork_harness import run_forks, run_ranks
from ..data_parallel.batch_norm import batch_norms, splits_batches
from ..models.fingerprint import Description, Part, describe_model
from ..models.modalities.audio import is_audio
from ..models.modalities.images import PIXELS, image_token, is_image_argument
from ..models.modalities.videos import is_video_argument
from ..models.type_facts import get_type_facts
from ..models.verification_gate import ConfigUnderTest
from .measure import Measurement, measure
from .multimodal_batch import make_multimodal_batch
from .reference import take_reference
from .speech_batch import make_speech_batch
from .tiny_config import full_config, tiny_config
from .tiny_model import TASKS, draw_parameters, make_batch
from .tolerances import WELL_CONDITIONED, Error, ParityComparison, frozen_errors, judge

# Exceptions that transformers raises for configs of tiny sizes.
UNBUILDABLE = (
    *(ValueError, RuntimeError, TypeError, KeyError, AttributeError, AssertionError, ImportError, StrictDataclassError),
)
# Number of seeds to try for a well-conditioned draw.
_DRAWS = 10


@dataclass
class TinyModel:
    """A tiny model saved to disk, with its batches and its single-process reference.

    Attributes:
        model_class (`type`): class of the model.
        directory (`Path`): folder of the saved model.
        batches (`list[dict[str, Tensor]]`): microbatches of one optimizer step.
        reference (`Measurement`): single-process results.
        config (`PreTrainedConfig`): the tiny config.
        full (`Description`): description of the full-size model.
        build_full (`Callable`, *optional*): builds the full-size model on the default device.
        adapt (`Callable`, *optional*): adds an adapter to a loaded model and returns the model.
        arguments (`Mapping`, *optional*): arguments of `from_pretrained` other than the layout.
        draw (`int`): index of the draw of its parameters.
        frozen_norms (`Measurement`, *optional*): reference with batch norms in evaluation mode, for layouts that split
            batches; measured on first use.
    """

    model_class: Any
    directory: Path
    batches: list[dict[str, Tensor]]
    reference: Measurement
    config: PreTrainedConfig
    full: Description = Description((), frozenset(), {})
    build_full: Callable[[], Any] | None = None
    adapt: Callable[[Any], Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    draw: int = 0
    frozen_norms: Measurement | None = None

    def model_on_meta(self) -> Any:
        """Builds the unsharded model on the meta device."""
        with torch.device("meta"):
            return self.model_class(type(self.config).from_pretrained(self.directory))

    def load(self, **kwargs: Any) -> Any:
        """Loads the model; pass `megatron_config=` on the ranks of a job."""
        model = self.model_class.from_pretrained(self.directory, **self.arguments, **kwargs)
        return model if self.adapt is None else self.adapt(model)

    @property
    def class_name(self) -> str:
        """Name of the model's class."""
        return str(self.model_class.__name__)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities of the batches besides text: `"images"`, `"videos"`, `"audio"`."""
        of_kinds = {"images": is_image_argument, "videos": is_video_argument, "audio": is_audio}
        names = {name for batch in self.batches for name in batch}
        return tuple(kind for kind, belongs in of_kinds.items() if any(map(belongs, names)))

    def delete(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def make_tiny_model(
    config: PreTrainedConfig,
    *,
    task: str = "causal",
    model_class: type | str | None = None,
    changes: dict[str, Any] | None = None,
    microbatches: int = 1,
    seed: int = 0,
    sequence_length: int = 13,
    batch_size: int = 3,
    min_layers: int = 2,
    known_draw: int | None = None,
) -> TinyModel:
    """Builds a tiny model and measures its reference in forks of this process.

    A draw of parameters whose single-process results differ by more than half the limit between fp32 and fp64 is not
    usable as a reference: a router may choose other experts after one optimizer step. The next seed is tried in that
    case. The choice never depends on a parallel run.

    Args:
        config (`PreTrainedConfig`): config of any size, which is shrunk.
        task (`str`): a key of `TASKS`.
        model_class (`type` or `str`, *optional*): a class, or the name of one in transformers, instead of the task's
            Auto class.
        changes (`dict`, *optional*): attributes to set on the tiny config.
        microbatches (`int`): batches per optimizer step, with unequal numbers of labels.
        seed (`int`): seed of the parameters and batches.
        sequence_length, batch_size (`int`): size of each batch.
        min_layers (`int`): minimum number of layers, as far as the config has them; there are more if the config has
            more kinds of layers.
        known_draw (`int`, *optional*): index of a previously chosen draw; no other is tried.
    """
    build_full = functools.partial(build, full_config(config), task, model_class)
    with torch.device("meta"):
        full = describe_model(build_full())
    tiny = tiny_config(config, min_layers, find_required_layers(full))
    text = tiny.get_text_config()
    if task == "classification" and text.pad_token_id is None:
        # Decoders classify at the last non-padding token, so they need a padding token.
        changes = {"pad_token_id": 0, **(changes or {})}
    for name, value in (changes or {}).items():
        setattr(text, name, value)
    length = max(sequence_length, get_type_facts(config.model_type).min_row_length)
    sizes = {"batch_size": batch_size, "sequence_length": length}
    best, others = best_draw(
        lambda draw, best: _draw(tiny, task, model_class, microbatches, seed + draw, sizes, best), known_draw
    )
    for tiny_model in others:
        tiny_model.delete()
    best.full, best.build_full = full, build_full
    return best


def best_draw(draw: Callable[[int, float], TinyModel], known: int | None = None) -> tuple[TinyModel, list[TinyModel]]:
    """Returns the first well-conditioned draw, or the best one if there is none, and the other draws.

    Args:
        draw (`Callable`): called with the index of the draw and the smallest round-off of the previous draws; returns a
            `TinyModel`.
        known (`int`, *optional*): index of a previously chosen draw; no other is tried.
    """
    threads = torch.get_num_threads()
    draw_indices = range(_DRAWS) if known is None else [known]
    draws: list[TinyModel] = []
    try:
        # One thread, as on the ranks: for tensors of this size, several threads mostly wait for each other.
        torch.set_num_threads(1)
        for number in draw_indices:
            best = min((tiny_model.reference.round_off for tiny_model in draws), default=math.inf)
            draws.append(draw(number, best))
            draws[-1].draw = number
            if draws[-1].reference.round_off <= WELL_CONDITIONED:
                break
    finally:
        torch.set_num_threads(threads)
    chosen = min(draws, key=lambda tiny_model: tiny_model.reference.round_off)
    return chosen, [tiny_model for tiny_model in draws if tiny_model is not chosen]


def build(config: PreTrainedConfig, task: str, model_class: type | str | None = None) -> Any:
    """Builds a model of a class, a class of transformers, or the task's Auto class, with its initial weights."""
    if isinstance(model_class, type):
        return model_class(config)
    builder = getattr(transformers, model_class or TASKS[task])
    return builder(config) if model_class else builder.from_config(config)


def find_required_layers(full: Description) -> frozenset[int]:
    """Returns the index of the first layer of each kind in the full model, which the tiny model has to keep."""
    first: dict[Part, int] = {}
    for layer, part in full.layers({}).items():
        first.setdefault(part, int(layer.rpartition(".")[2]))
    return frozenset(first.values())


def _draw(
    tiny: PreTrainedConfig,
    task: str,
    model_class: type | str | None,
    microbatches: int,
    seed: int,
    sizes: dict[str, Any],
    best: float,
) -> TinyModel:
    torch.manual_seed(seed)
    model = build(tiny, task, model_class).float()
    draw_parameters(model, seed)
    directory = Path(tempfile.mkdtemp(prefix="hf_megatron_tiny_"))
    model.save_pretrained(directory)
    if task in ("image", "video", "audio") or (task == "masked" and image_token(model.config) is not None):
        batch_kwargs = {"batch_size": sizes["batch_size"], "videos": task == "video", "audio_clips": task == "audio"}
        batches = [make_multimodal_batch(model, **batch_kwargs, seed=seed + index) for index in range(microbatches)]
        if task == "video" and PIXELS not in batches[0]:
            # The model takes either images or videos: every other batch has images.
            batch_kwargs["videos"] = False
            batches[1::2] = [
                make_multimodal_batch(model, **batch_kwargs, seed=seed + n) for n in range(1, microbatches, 2)
            ]
    elif task == "seq2seq" and image_token(model.config) is not None:
        batches = [
            make_multimodal_batch(model, batch_size=sizes["batch_size"], seed=seed + index)
            | {"labels": make_batch(tiny, seed=seed + index, task=task, **sizes)["labels"]}
            for index in range(microbatches)
        ]
    elif task == "speech":
        batches = [make_speech_batch(model, seed=seed + index, **sizes) for index in range(microbatches)]
    else:
        batches = [make_batch(tiny, seed=seed + index, task=task, **sizes) for index in range(microbatches)]
    # The reference loads the saved file too, so that both sides start from the same weights.
    return measured(TinyModel(type(model), directory, batches, Measurement(0, 0, 0), model.config), best)


def measured(tiny_model: TinyModel, best: float = math.inf) -> TinyModel:
    """Measures the reference of a tiny model in a fork of this process; `best` as in `take_reference`."""
    tiny_model.reference = run_in_fork(lambda: take_reference(tiny_model, best=best))
    tiny_model.frozen_norms = None
    return tiny_model


def _measured_with_frozen_norms(tiny_model: TinyModel) -> Measurement:
    if tiny_model.frozen_norms is None:
        tiny_model.frozen_norms = run_in_fork(lambda: take_reference(tiny_model, norms_are_frozen=True))
    return tiny_model.frozen_norms


def run_in_fork(function: Callable[[], Any]) -> Any:
    """Returns the result of a function that is called in a fork of this process; it must be picklable.

    A backward in this process would make torch start a thread for each GPU, and so would a CUDA tensor: no later fork
    of this process could use the GPUs.

    Raises:
        RuntimeError: the function raised one of the `UNBUILDABLE` exceptions.
    """

    def outcome() -> tuple[Any, str, str]:
        try:
            return function(), "", ""
        except UNBUILDABLE as error:
            # Some exceptions cannot be pickled, so pass their text.
            return None, "".join(traceback.format_exception_only(error)).strip(), traceback.format_exc()

    [(result, problem, trace)] = run_forks(outcome, [0], 1, lambda *_: None, timeout=1200)
    if problem:
        error = RuntimeError(problem)
        error.add_note(trace)
        raise error
    return result


def check_tiny_model(
    tiny_model: TinyModel,
    config: MegatronConfig,
    *,
    sabotage: Callable[[], None] | None = None,
    timeout: float = 120.0,
    prepare: Callable[[Any], None] | None = None,
    device: str = "cpu",
) -> ParityComparison:
    """Compares a tiny model on the ranks of a layout with its single-process reference.

    Args:
        tiny_model (`TinyModel`): from `make_tiny_model`.
        config (`MegatronConfig`): the layout, which need not have a recorded result.
        sabotage (`Callable`, *optional*): called on every rank before the model is loaded, to inject a fault.
        timeout (`float`): seconds.
        prepare (`Callable`, *optional*): called with the model before it is measured.
        device (`str`): device of the ranks, see `run_ranks`.
    """

    layout = ConfigUnderTest(**config.to_dict())
    freezes = splits_batches(layout, config.dp_size or 1) and bool(batch_norms(tiny_model.model_on_meta()))
    reference = _measured_with_frozen_norms(tiny_model) if freezes else tiny_model.reference

    def on_rank() -> Measurement:
        if sabotage is not None:
            sabotage()
        model = tiny_model.load(megatron_config=layout)
        if prepare is not None:
            prepare(model)
        return measure(model, tiny_model.batches, norms_are_frozen=freezes)

    ranks = config.ranks_per_replica * (config.dp_size or 1)
    measurements = run_ranks(on_rank, ranks, timeout=timeout, device=device)
    comparison = judge(measurements[0], reference)
    if tiny_model.adapt is not None:
        comparison = ParityComparison((*frozen_errors(measurements[0], reference), *comparison.errors))
    for rank, other in enumerate(measurements[1:], 1):
        if (other.loss, other.norm) != (measurements[0].loss, measurements[0].norm):
            disagreement = Error(f"rank {rank} reports a different loss or norm than rank 0", float("inf"))
            return ParityComparison((disagreement, *comparison.errors))
    return comparison
