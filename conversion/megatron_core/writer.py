"""Writer of Megatron-Core's `torch_dist` checkpoints without Megatron, with one layer in memory at a time.

File names in the docstrings are relative to `megatron/core` of megatron-core 0.16.1.
"""

import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from ..dcp.store_writer import StoreWriter
from ..interfaces import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, MegatronModel, OptimizerState, Writer
from ..megatron.folder import TRACKER, folder_name, tracker_text
from ..megatron.names import EMBEDDING, STACK, has_state, is_encoder_weight
from ..output_folder import Output
from ..torch_files.archive_writer import write_object
from .common_state import is_plain_value, optimizer_state, rate_schedule
from .reader import COMMON, COMMON_OBJECT, CONFIG

_EXPERTS = ".mlp.experts.experts."
_FIRST_LINEAR = re.compile(r".+\.linear_fc1\.(weight|bias)")
_MOMENTS = {MAIN_WEIGHT: "param", EXP_AVG: "exp_avg", EXP_AVG_SQ: "exp_avg_sq"}


class MegatronCoreWriter(Writer):
    """A checkpoint that megatron-core loads at any tp, pp and ep, both dense weights and experts.

    The output becomes the folder with `latest_checkpointed_iteration.txt`; tensors are stored in `iter_*`, or in
    `release` if there is neither an iteration nor an optimizer. Chunks are the ones that megatron-core writes on one
    rank. The common state is written twice, for megatron-core up to 0.16 and after.

    Megatron-LM needs `--no-load-rng`, because there are no RNG states, and `--override-opt-param-scheduler` to resume
    with an optimizer, which uses the schedule of its own arguments. Experts' moments belong to a separate optimizer if
    the model's arguments have an `expert_model_parallel_size` of 2 or more.

    Raises:
        CheckpointError: moments are planned without an optimizer, or not all three of a weight, or layers are missing.
    """

    def __init__(
        self,
        output: Output,
        plan: Mapping[Key, TensorMeta],
        model: MegatronModel,
        iteration: int | None = None,
        optimizer: OptimizerState | None = None,
    ):
        super().__init__(plan)
        self._output, self._model, self._optimizer = output, model, optimizer
        if iteration is None and optimizer is not None:
            iteration = optimizer.step
        self._iteration = iteration
        self._folder = f"{folder_name(iteration)}/"
        self._check_moments()
        self._stack_sizes: dict[str, int] = {}
        self._stacked = self._layers_are_identical()
        self._store = StoreWriter(output, self._folder)

    def _check_moments(self) -> None:
        kinds: dict[str, set[str]] = {}
        for key in self.plan:
            kinds.setdefault(key.name, set()).add(key.kind)
        for name, name_kinds in kinds.items():
            if WEIGHT not in name_kinds:
                raise CheckpointError(f"{name} has optimizer moments but no weight.")
            if name_kinds - {WEIGHT} not in (set(), set(_MOMENTS)) or (len(name_kinds) > 1 and self._optimizer is None):
                raise CheckpointError(
                    f"{name}: Megatron's optimizer has {', '.join(_MOMENTS)} for a weight, planned "
                    f"{sorted(name_kinds)}."
                )

    def _layers_are_identical(self) -> bool:
        """Returns whether Megatron stacks the layers of this model (transformer/transformer_block.py)."""
        stacks: dict[str, dict[int, dict[str, TensorMeta]]] = {}
        for key, entry in self.plan.items():
            if key.kind == WEIGHT and (match := STACK.fullmatch(key.name)):
                stacks.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = entry
        sizes = {
            f"{self._model.prefix}{block}.layers": size for block, size in self._model.num_layers_per_block.items()
        }
        for name, layers in {**dict.fromkeys(sizes, {}), **stacks}.items():
            size = sizes.get(name, len(layers))
            if layers.keys() != set(range(size)):
                raise CheckpointError(f"The model has {size} layers ({name}), but layers {sorted(layers)} are planned.")
            self._stack_sizes[name] = size
        arguments = self._model.arguments
        if not self._model.stacked:
            return False
        # A number n > 1 means that every n-th layer differs; Megatron treats any list as differing layers.
        frequencies = (arguments.get("moe_layer_freq"), arguments.get("linear_attention_freq"))
        if any(frequency is not None and frequency != 1 for frequency in frequencies):
            return False
        if arguments.get("heterogeneous_block_specs") or arguments.get("hetereogenous_dist_checkpoint"):
            return False
        return all(layer == stack[0] for stack in stacks.values() for layer in stack.values())

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check_once(key, tensor)
        prefix = "" if key.kind == WEIGHT else f"optimizer.state.{_MOMENTS[key.kind]}."
        name, place = self._stored(key.name)
        stack, front = ((), ()) if place is None else ((place[1],), (place[0],))
        if blocks := self._model.blocks_of(key.name):
            # ssm/mamba_mixer.py, `_split_tensor_factory`
            for block, part in zip(blocks, tensor.split(list(blocks.values())), strict=True):
                self._store.write_chunk(f"{prefix}{name}.{block}", part.shape, (0,) * part.dim(), part)
            return
        for offset, chunk in self._chunks(key.name, tensor):
            self._store.write_chunk(prefix + name, (*stack, *tensor.shape), (*front, *offset), chunk)

    def _stored(self, name: str) -> tuple[str, tuple[int, int] | None]:
        """Returns the name in the store and, if layers are stacked, the layer's index and the number of layers."""
        match = STACK.fullmatch(name) if self._stacked else None
        return (f"{match[1]}.{match[3]}", (int(match[2]), self._stack_sizes[match[1]])) if match else (name, None)

    def _chunks(self, name: str, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yields experts, and gate and up, as separate chunks (transformer/mlp.py, `apply_swiglu_sharded_factory`).

        A reader loads a full chunk from its file for every part it needs, so chunks follow the expected splits.
        """
        boxes, dim = [((0,) * tensor.dim(), tensor)], 0
        if _EXPERTS in name:
            rest, dim = (0,) * (tensor.dim() - 1), 1
            boxes = [((expert, *rest), tensor[expert : expert + 1]) for expert in range(len(tensor))]
        halves = (
            self._model.gated
            and not is_encoder_weight(name)
            and _FIRST_LINEAR.fullmatch(name)
            and tensor.shape[dim] % 2 == 0
        )
        for offset, box in boxes:
            if not halves:
                yield offset, box
                continue
            middle = tensor.shape[dim] // 2
            for half, part in enumerate(box.chunk(2, dim)):
                yield (*offset[:dim], half * middle, *offset[dim + 1 :]), part

    def finish(self) -> None:
        self.check_complete()
        for name in self._extra_states():
            # megatron-core's encoding of a ShardedObject without data.
            self._store.write_object(name, [None])
        common = self._common()
        self._store.write_object(COMMON_OBJECT, [common])
        self._store.finish()
        write_object(self._output.create(self._folder + COMMON), common)
        config = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        self._output.add(self._folder + CONFIG, json.dumps(config))
        self._output.add(TRACKER, tracker_text(self._iteration))

    def _extra_states(self) -> Iterator[str]:
        """Yields the objects that a strict load expects: one per layer and expert of modules that may be from TE.

        Loading ignores objects for modules that the model does not have. GPTModel expects none for its output layer;
        BertModel and MambaModel do, even if it has no weight.
        """
        output = f"{self._model.prefix}output_layer"
        yield f"{output}._extra_state/shard_0_1"
        seen = {output}
        for key, entry in self.plan.items():
            local_name = key.name.removeprefix(self._model.prefix)
            if key.kind != WEIGHT or local_name.startswith("embedding.") or not has_state(key.name):
                continue
            modules = [key.name.rpartition(".")[0]]
            if match := re.fullmatch(r"(.+\.(?:self|cross)_attention)\..+", key.name):
                modules.append(f"{match[1]}.core_attention")
            for module in modules:
                if module in seen:
                    continue
                seen.add(module)
                stored, layer = self._stored(f"{module}._extra_state")
                place = [] if layer is None else [layer]
                experts = entry.shape[0] if _EXPERTS in key.name else 0
                for expert in range(experts or 1):
                    grid = [*place, (expert, experts)] if experts else place or [(0, 1)]
                    offsets, sizes = (".".join(str(pair[side]) for pair in grid) for side in (0, 1))
                    yield f"{stored}/shard_{offsets}_{sizes}"

    def _common(self) -> dict[str, Any]:
        content = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        if not self._stacked:
            content["non_homogeneous_layers"] = True
        common: dict[str, Any] = {
            "args": self._arguments(),
            "checkpoint_version": 3.0,
            "iteration": self._iteration or 0,
            "content_metadata": content,
        }
        if self._optimizer is not None:
            ranks = int(self._model.arguments.get("expert_model_parallel_size") or 1)
            experts_apart = ranks > 1 and any(_EXPERTS in key.name for key in self.plan)
            common["optimizer"] = optimizer_state(self._optimizer, experts_apart)
            samples = int(self._model.arguments.get("consumed_train_samples") or 0)
            common["opt_param_scheduler"] = rate_schedule(self._optimizer, samples)
        return common

    def _arguments(self) -> Namespace:
        """Returns the arguments for `--use-checkpoint-args` and the ones compared by training/checkpointing.py."""
        arguments = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, **self._model.arguments}
        arguments |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True, "iteration": self._iteration or 0}
        prefix = self._model.prefix
        untied = Key(WEIGHT, f"{prefix}output_layer.weight") in self.plan
        arguments.setdefault("untie_embeddings_and_output_weights", untied)
        if embedding := self.plan.get(Key(WEIGHT, prefix + EMBEDDING)):
            arguments["padded_vocab_size"] = embedding.shape[0]
        if self._optimizer is not None:
            arguments |= {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
        for name, value in arguments.items():
            if not is_plain_value(value):
                raise CheckpointError(f"The argument {name} is {value!r}: expected a plain value.")
        return Namespace(**arguments)
