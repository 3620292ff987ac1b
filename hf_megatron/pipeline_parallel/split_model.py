"""Splits a meta model into pipeline stages: placeholders replace off-stage modules before weights are loaded."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..compat.instance_patches import mix_into
from ..config import MegatronConfig
from ..core.axes import Axes
from ..core.parameter_walk import list_named_parameters
from ..data_parallel.dynamic_rope import scales_by_length
from ..errors import UnsupportedError
from ..models.layers import LayerSequence, find_full_sequence_blocks
from ..models.spec import ModelSpec
from .boundary import StageBoundary
from .layers_per_stage import make_stages, require_features_on_first_stage
from .module_mixins import (
    OffStageBetween,
    OffStageLayer,
    OffStageOutput,
    StagedBetween,
    StagedInput,
    StagedLayer,
    convolves,
    embeds_tokens,
    hold_parts,
    layer_indices,
    output_width,
)
from .multi_part_layers import stand_for_parts
from .off_stage_images import (
    OffStageEncoder,
    OffStageShapes,
    StagedChange,
    StagedPrefix,
    call_in_first_stage,
    get_input_class,
    required_images,
)
from .off_stage_module import Placeholder, first_dtype, replace_module
from .partition import Stages
from .pre_post_process import (
    drop_ties,
    find_around,
    find_modality_encoders,
    find_siblings,
    find_tied,
    find_tied_before,
    has_parameters,
    put_head_last,
)
from .stage_payload import Carried
from .support_checks import row_to_cut
from .tied_layers import find_shared, hold_shared


@dataclass
class ModelPartition:
    """Partition of a model into pipeline stages, as seen by one rank.

    Attributes:
        boundary: runs the stages of this rank.
        layers: the layers, in the order in which they run.
        before, between, after: names of the modules with parameters before the layers, after an encoder's layers, and
            after all layers.
        alongside: names of direct parameters of the layers' ancestors, which belong to the first stage.
        off_stage_names: the ones of `alongside` that another rank holds -> tensors of their shapes and dtypes.
        tied: names of parameters that two ranks hold, usually the first and the last.
        sources: name of a tied weight -> name of the parameter that it is tied to.
        holds_first: whether this rank holds the first stage.
        mixes_documents: whether the documents of a packed sequence interact outside attention.
    """

    boundary: StageBoundary
    layers: LayerSequence
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    alongside: tuple[str, ...]
    off_stage_names: Mapping[str, torch.Tensor]
    tied: tuple[str, ...]
    sources: Mapping[str, str]
    holds_first: bool
    mixes_documents: bool

    def retie(self, tied: tuple[str, ...], sources: Mapping[str, str]) -> None:
        """Replaces the names of tied weights, after modules were wrapped or unwrapped."""
        self.tied, self.sources = tied, MappingProxyType(dict(sources))

    def require_order(self, model: nn.Module) -> None:
        """Raises `UnsupportedError` on all ranks if user code has removed, moved or repeated layers."""
        # `_modules` instead of `children()`: the latter lists a repeated module once.
        layers = [layer for name in self.layers.lists for layer in model.get_submodule(name)._modules.values()]
        places = [index for layer in layers if layer is not None for index in layer_indices(layer)]
        if places != list(range(self.boundary.stages.ranges[-1][1])):
            raise UnsupportedError(
                f"{' and '.join(self.layers.lists)} lists the layers {places} of a model that is split into pipeline "
                "stages: layers cannot be removed, moved or repeated. Load the model with pp_size=1."
            )

    def reject_added(self, model: nn.Module, known: Collection[str]) -> None:
        """Raises `UnsupportedError` on all ranks if trained weights were added to the model outside its stages.

        Args:
            known: names of the weights that have a sharding, from loading or from an adapter.
        """
        lists = *self.layers.lists, *self.layers.parts
        parts = tuple(f"{name}." for name in (*lists, *self.before, *self.between, *self.after))
        for name, parameter in list_named_parameters(model).items():
            if parameter.requires_grad and name not in known and not name.startswith(parts):
                raise UnsupportedError(
                    f"{name} was added to a pipelined model after loading, outside of its stages: every rank would "
                    "train a separate copy. Define it in a model class of your own and load that with "
                    "from_pretrained(..., megatron_config=...), freeze it, or load the model with pp_size=1."
                )

    def list_modules(self, model: nn.Module, stage: int) -> list[nn.Module]:
        """Returns the modules with parameters of one of this rank's stages."""
        start, stop = self.boundary.stages.ranges[stage]
        names = [name for layer in range(start, stop) for name in self.layers.get_layer_modules(layer)]
        if stage == 0:
            names = [*self.before, *names]
        if start < self.layers.decoder <= stop:
            names = [*names, *self.between]
        if stage == len(self.boundary.stages.ranges) - 1:
            names = [*names, *self.after]
        return [model.get_submodule(name) for name in names]

    def list_parameters(self, model: nn.Module, stage: int) -> list[nn.Parameter]:
        """Returns the parameters of one of this rank's stages; a shared one may be listed twice."""
        alongside = [model.get_parameter(name) for name in self.alongside] if stage == 0 else []
        return alongside + [
            parameter
            for module in self.list_modules(model, stage)
            for parameter in list_named_parameters(module).values()
        ]

    def ends(self, model: nn.Module) -> list[nn.Module]:
        """Returns the on-stage modules with parameters before, between and after the layers."""
        used = (*(self.before if self.holds_first else ()), *self.between, *self.after)
        modules = [model.get_submodule(name) for name in used]
        return [module for module in modules if not isinstance(module, Placeholder) and has_parameters(module)]

    def dtypes(self, model: nn.Module) -> tuple[torch.dtype | None, ...]:
        """Returns the dtypes of all stages' modules, which are the same on every rank; placeholders follow casts."""
        return tuple(first_dtype(model.get_submodule(name)) for name in (*self.before, *self.layers.names))

    def describe_stages(self, parameter: str) -> str:
        """Returns the stages that hold a parameter, in words."""
        first = self.stage_of(parameter)
        last = len(self.boundary.stages.ranges) - 1
        return f"{first} and {last}" if parameter in self.tied else str(first)

    def owner(self, name: str) -> int:
        """Returns the pipeline rank that owns a weight or buffer; a tied weight belongs to the first stage."""
        return self.boundary.stages.rank_of[self.stage_of(name)]

    def stage_of(self, parameter: str) -> int:
        """Returns the stage that owns a parameter; a tied one belongs to the first."""
        if (layer := self.layers.find_layer(parameter)) is not None:
            return self.boundary.stages.get_layer_stage(layer)
        if any(parameter.startswith(f"{module}.") for module in self.between):
            return self.boundary.stages.get_layer_stage(self.layers.decoder - 1)
        trailing = any(parameter.startswith(f"{module}.") for module in self.after)
        return len(self.boundary.stages.ranges) - 1 if trailing else 0


def cut(model: Any, spec: ModelSpec, config: MegatronConfig, axes: Axes) -> ModelPartition:
    """Splits a meta model into stages and keeps this rank's; the other modules become placeholders.

    Raises:
        UnsupportedError: if the model is not a single stack of layers, or the configuration does not allow the split.
        ConfigError: if the number of stages does not fit the layers.
    """
    row = row_to_cut(model, spec, config, axes)
    layers = [model.get_submodule(name) for name in row.names]
    put_head_last(model, row.lists[0])
    in_parts = [nn.ModuleList(map(model.get_submodule, row.get_layer_modules(layer))) for layer in range(len(layers))]
    stages = make_stages(model, in_parts if row.parts else layers, config)
    require_features_on_first_stage(model, stages)
    boundary = StageBoundary(stages, Carried.of(spec, layers, row.decoder))
    mixes_documents = scales_by_length(model.config) or bool(find_full_sequence_blocks(model, spec, row.lists[-1]))
    owned = stages.of_rank(axes.rank("pp"))
    holds_first, holds_last = 0 in owned, len(stages.ranges) - 1 in owned
    around = find_around(model, row, spec)
    before, between, after = around.before, around.between, around.after
    alongside = find_siblings(model, row, spec)
    tied = find_tied(model, before, after)
    tied_before = find_tied_before(model, before)
    shared_layers = find_shared(model, row, stages, config, axes)
    if tied_before and config.zero_stage == 3 and axes.size("dp_cp") > 1:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size} with zero_stage = 3: {', '.join(tied_before)} of "
            f"{type(model).__name__} are tied to {next(iter(tied_before.values()))}, but FSDP2 would shard them as "
            "separate weights. Use zero_stage 1 or 2."
        )
    if inside := [source for target, source in tied.items() if not _can_be_held(model, target, source, before)]:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: the head of {type(model).__name__} is tied to {inside[0]}, "
            "which belongs to a module that only the first stage has. Load it with pp_size=1."
        )

    # Layers: a mixin for on-stage ones, a placeholder for off-stage ones.
    away: dict[str, nn.Module] = {}
    for index, (name, layer) in enumerate(zip(row.names, layers, strict=True)):
        place = None if stages.get_layer_stage(index) in owned else _place(stages, stages.get_layer_stage(index))
        if place is None:
            mix_into(layer, StagedLayer, _stage_boundary=boundary, _layer_index=index)
        else:
            replace_module(model, name, OffStageLayer(layer, place, boundary, index))
            away[name] = layer
        away |= stand_for_parts(model, row.get_layer_modules(index)[:-1], index, boundary, place)
    hold_shared(model, row, away, set(shared_layers.values()))
    modality_encoders = find_modality_encoders(model)
    # Modules before the layers: on-stage on the first stage, and on the last one if its head is tied to them.
    for module_name in before:
        module = model.get_submodule(module_name)
        if module_name in modality_encoders and module_name not in spec.pp.prefix_modules:
            if not holds_first:
                replace_module(model, module_name, OffStageEncoder(module_name, module, _place(stages, 0), boundary))
            elif required_images(model.forward):
                # The forward requires images: in later stages of this rank the encoder is called without them.
                call_in_first_stage(module, boundary)
            continue
        runs_everywhere = module_name in spec.pp.run_on_all_stages
        is_prefix = module_name in spec.pp.prefix_modules or (
            row.decoder > 0 and convolves(module) and not runs_everywhere
        )
        if is_prefix and holds_first:
            mix_into(module, StagedPrefix, _stage_boundary=boundary)
            continue
        needed_by_head = [name for name in tied.values() if holds_last and name.startswith(f"{module_name}.")]
        if runs_everywhere and (holds_first or len(needed_by_head) == len([*module.parameters()])):
            continue
        if (holds_first or needed_by_head) and not is_prefix:
            width = output_width(module)
            if not holds_first:
                needed = [name.removeprefix(f"{module_name}.").split(".") for name in needed_by_head]
                if all(len(path) > 1 for path in needed):
                    parts_of_head = {path[0] for path in needed}
                    hold_parts(module, parts_of_head, module_name, _place(stages, 0), boundary)
            mix_into(module, StagedInput, _stage_boundary=boundary, _name=module_name, _width=width)
        else:
            kind = get_input_class(module, is_prefix=is_prefix, runs_everywhere=runs_everywhere)
            replace_module(model, module_name, kind(module_name, module, _place(stages, 0), boundary))
    # Modules between encoder and decoder belong to the stage of the encoder's last layer.
    for module_name in between:
        module, stage = model.get_submodule(module_name), stages.get_layer_stage(row.decoder - 1)
        if stage in owned:
            mixin = StagedChange if convolves(module) else StagedBetween
            mix_into(module, mixin, _stage_boundary=boundary, _stage=stage, _width=output_width(module))
        else:
            placeholder_class = OffStageShapes if convolves(module) else OffStageBetween
            replace_module(model, module_name, placeholder_class(module_name, module, _place(stages, stage), boundary))
    for module_name in after if not holds_last else ():
        module, place = model.get_submodule(module_name), _place(stages, len(stages.ranges) - 1)
        replace_module(model, module_name, OffStageOutput(module_name, module, place, boundary))
    off_stage = {side for side, is_held in (("before", holds_first), ("after", holds_last)) if not is_held}
    if off_stage or away:
        drop_ties(model, off_stage, around, away)
    off_stage_names = {} if holds_first else {weight: _take_away(model, weight) for weight in alongside}
    crossing = stages.rank_of[0] != stages.rank_of[-1]
    shared = sorted({*(tied.values() if crossing else ()), *shared_layers.values()})
    parts = (
        tuple(before),
        tuple(between),
        tuple(after),
        tuple(alongside),
        MappingProxyType(off_stage_names),
        tuple(shared),
        MappingProxyType(tied | tied_before | shared_layers),
    )
    return ModelPartition(boundary, row, *parts, holds_first, mixes_documents)


def _can_be_held(model: nn.Module, target: str, source: str, before: list[str]) -> bool:
    """Returns whether the last stage can also hold the weight before the layers that its head is tied to.

    It must belong to a module before the layers or to an embedding table inside one. Its first name in the model must
    be the same at both ends of the pipeline.
    """
    table = source.rpartition(".")[0]
    embeddings = table.rpartition(".")[0]
    if table in before or embeddings not in before:
        return table in before
    names = [name for name, _ in model.named_modules()]
    comes_first = names.index(table) < names.index(target.rpartition(".")[0])
    return comes_first and embeds_tokens(model.get_submodule(embeddings))


def _place(stages: Stages, stage: int) -> str:
    return f"lies on stage {stage} of the pipeline, pp rank {stages.rank_of[stage]}"


def _take_away(model: nn.Module, weight: str) -> torch.Tensor:
    """Removes a parameter so that the loader does not fill it; returns it."""
    path, _, name = weight.rpartition(".")
    owner = model.get_submodule(path)
    parameter = owner.get_parameter(name)
    owner._parameters[name] = None
    # Keeps the loader from initializing it as well.
    owner._is_hf_initialized = True  # type: ignore[assignment]
    return parameter
