"""`MegatronConfig`: all settings of a run; validation errors name the field, its value and the valid choices."""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError

# Megatron-LM's argument names, without the leading dashes, and the field each one sets.
MEGATRON_ARGUMENTS: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "num_virtual_stages_per_pipeline_rank": "virtual_stages",
    "context_parallel_size": "cp_size",
    "cp_comm_type": "cp_comm_type",
    "hierarchical_context_parallel_sizes": "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size": "ep_size",
    "expert_tensor_parallel_size": "etp_size",
    "moe_router_bias_update_rate": "router_bias_update_rate",
    "data_parallel_size": "dp_size",
    "sequence_parallel": "sequence_parallel",
    "recompute_granularity": "recompute",
    "clip_grad": "gradient_clipping",
    "optimizer_cpu_offload": "offload_optimizer",
    "use_distributed_optimizer": "zero_stage",
}
SIZES = ("tp_size", "cp_size", "pp_size", "dp_size", "ep_size", "dp_replicate_size")
PARTITIONS = ("cost", "layers")
# Frozen models that trainers load in addition to the trained one.
FROZEN = ("reference", "reward", "teacher")
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "recompute": (None, "full", "selective"),
    "router_aux_loss_scope": ("batch", "sequence", "microbatch", "global"),
    "cp_comm_type": (None, "p2p", "a2a", "all_gather", "a2a+p2p"),
    "unverified": ("check", "raise", "allow"),
}


# Earlier field names, for files written before they were renamed.
_EARLIER_NAMES = {
    "frozen": "frozen_models",
    "pack_activations": "shard_saved_activations",
    "auxiliary_loss": "router_aux_loss_scope",
    "router_z_loss": "router_z_loss_coef",
    "replay_routing": "router_replay",
    "main_weights_in_fp32": "fp32_main_params",
}
# Earlier fields without a successor, which files may contain.
_REMOVED_NAMES = ("allow_unverified",)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_OPTIONAL_COUNTS = (
    *("dp_size", "etp_size", "bucket_size", "loss_chunk_size"),
    *("mlp_chunk_size", "num_microbatches", "virtual_stages"),
)
_COUNTS = (*(name for name in SIZES if name not in _OPTIONAL_COUNTS), "max_skipped_steps")
# (fields, test of the value, what is expected). `huggingface_hub.dataclasses.strict` validates no frozen dataclass.
_FIELD_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_COUNTS, _is_count, "an integer of 1 or more"),
    (
        _OPTIONAL_COUNTS,
        lambda value: value is None or _is_count(value),
        "an integer of 1 or more",
    ),
    (("zero_stage",), lambda value: _is_integer(value) and value in (0, 1, 2, 3), "0, 1, 2 or 3"),
    (
        (
            *("sequence_parallel", "strict_loading", "fp32_main_params", "async_save"),
            *("offload_optimizer", "offload_activations", "verify_checksums", "router_replay"),
        ),
        lambda value: isinstance(value, bool),
        "True or False",
    ),
    (("shard_saved_activations",), lambda value: value is None or isinstance(value, bool), "True or False"),
    (("seed",), lambda value: value is None or _is_integer(value), "None or an integer"),
    (("timeout",), lambda value: _is_finite(value) and value > 0, "seconds, more than 0"),
    (
        ("router_bias_update_rate", "router_z_loss_coef"),
        lambda value: _is_finite(value) and value >= 0,
        "a number of 0 or more",
    ),
    (
        ("gradient_clipping",),
        lambda value: value is None or (_is_finite(value) and value > 0),
        "None or a norm, more than 0",
    ),
)


@dataclass(frozen=True)
class MegatronConfig:
    """Parallel layout of one model over the ranks of a job.

    The sizes follow Hugging Face's names; a size of 1 means the axis is not used.

    Args:
        tp_size (`int`, defaults to 1): ranks that shard each layer's weights (tensor parallel).
        sequence_parallel (`bool`, defaults to `False`): shard the sequence over the tp ranks wherever weights are
            replicated (norms, dropout, residual stream).
        shard_saved_activations (`bool`, *optional*): with `sequence_parallel`, save only the local shard of gathered
            activations for backward, which gathers them again, and recompute activation functions. By default
            everywhere but on gloo, where gathering again is slow.
        dp_size (`int`, *optional*): data-parallel ranks, each with a different batch; derived from the world size by
            default.
        zero_stage (`int`, defaults to 1): ZeRO stage: state sharded over the dp ranks instead of replicated: 0
            nothing, 1 the optimizer state, 2 also the reduced gradients, 3 also the weights.
        dp_replicate_size (`int`, defaults to 1): number of groups the dp ranks are divided into; state is sharded
            inside a group and replicated across groups (hybrid sharding: a group per node).
        bucket_size (`int`, *optional*): size in MiB of gradient buckets, each reduced while backward continues. By
            default Megatron's: 40 million elements, or a million per rank in the sharding group if that is more; on
            CPUs 32 MiB.
        fp32_main_params (`bool`, defaults to `True`): the optimizer keeps fp32 main params and moments of bf16 and
            fp16 parameters, whose gradients are accumulated and reduced in fp32. `False` keeps the parameters' dtype,
            as a stock optimizer does, on every layout. A job of one rank has a stock optimizer: with `True`, its step
            raises for such parameters.
        max_skipped_steps (`int`, defaults to 10): consecutive optimizer steps that may be skipped because of a
            non-finite gradient before training is aborted.
        offload_optimizer (`bool`, defaults to `False`): keep optimizer state and main params in CPU memory.
        async_save (`bool`, defaults to `False`): write checkpoints in the background from a copy in CPU memory while
            training continues.
        verify_checksums (`bool`, defaults to `True`): verify the checksums of a sharded checkpoint's files before
            reading it.
        recompute (`str`, *optional*): activations that backward recomputes: `"full"`, all activations of every layer
            (gradient checkpointing), or `"selective"`, the attention core's only.
        offload_activations (`bool`, defaults to `False`): with `recompute="full"`, offload the layer inputs saved for
            backward to CPU memory.
        mlp_chunk_size (`int`, *optional*): tokens that an MLP processes at a time in training, in forward and in
            recomputation during backward, so that the wide activations of only one chunk exist at a time. By default
            all tokens at once.
        gradient_clipping (`float`, *optional*): norm to which the optimizer clips gradients before a step, unless the
            training loop has clipped them (Trainer's `max_grad_norm`, `accelerator.clip_grad_norm_`).
        pp_size (`int`, defaults to 1): pipeline-parallel ranks, each with consecutive layers.
        num_microbatches (`int`, *optional*): number of microbatches a batch is split into along its batch dimension,
            so that stages work concurrently; a smaller batch is split into single samples. By default 4 x `pp_size`.
        pipeline_schedule (`str`, defaults to `"1f1b"`): the order of the microbatches' forwards and backwards:
            `"gpipe"`, `"1f1b"`, `"interleaved_1f1b"`, `"looped_bfs"`, `"interleaved_zero_bubble"`, `"zbv"` or
            `"dualpipev"`.
        virtual_stages (`int`, *optional*): stages per rank, for interleaved schedules; by default the schedule's own
            value.
        pipeline_partition (`str` or list of `int`, defaults to `"cost"`): assignment of layers to stages: `"cost"`
            balances the estimated work including the output head, `"layers"` balances the number of layers, a list
            sets the number for each stage.
        cp_size (`int`, defaults to 1): ranks that shard the tokens of each sequence (context parallel).
        cp_comm_type (`str`, *optional*): communication of attention across cp ranks, in Megatron's terms: `"p2p"`
            sends keys and values around a ring; `"a2a"` exchanges heads for tokens (Ulysses); `"all_gather"` gathers
            keys and values; `"a2a+p2p"` exchanges heads within groups of neighbors, which form a ring. By default,
            `"a2a"` over as many ranks as the model's key and value heads allow.
        hierarchical_context_parallel_sizes (pair of `int`, *optional*): sizes for `"a2a+p2p"`: neighbors that exchange
            heads, and the length of the ring; their product is `cp_size`.
        ep_size (`int`, defaults to 1): ranks that shard the experts of each layer, each holding some of them (expert
            parallel); tokens are dispatched to their experts and combined. It is no factor of the world size: it
            spans the ranks of a stage in the order tp, cp, dp, as a divisor or a multiple of each.
        etp_size (`int`, *optional*): ranks that shard the widths of every expert (expert tensor parallel), `tp_size`
            or 1; by default 1 with an `ep_size` of 2 or more, where ep takes the tp ranks itself.
        loss_chunk_size (`int`, *optional*): tokens per chunk of the fused head and cross entropy, on every layout; the
            local logits of only one chunk exist at a time. By default all tokens are one chunk, and without tensor
            and context parallelism the model computes its logits and its loss as transformers does.
        router_aux_loss_scope (`str`, defaults to `"batch"`): scope of a router's load balancing loss, if the model
            adds one (`output_router_logits`): `"batch"`, the global batch, as in a single process; `"sequence"`, each
            sequence, which is independent of the layout; `"microbatch"`, the tokens of one local forward; `"global"`,
            the expert counts of the step so far with the probabilities of the batch (Megatron's `global_aux_loss`).
            With a pipeline and several microbatches `"batch"` raises.
        router_z_loss_coef (`float`, defaults to 0): coefficient of the routers' z-loss, which is added to their load
            balancing loss, if the model adds one; its weight in the total loss is this coefficient times the model's
            `router_aux_loss_coef` (Megatron's `--moe-z-loss-coeff` adds it independently).
        router_bias_update_rate (`float`, defaults to 0): step size by which router biases move after each optimizer
            step towards experts with fewer tokens than the mean, in families that choose experts by scores plus a
            bias (DeepSeek-V3, GLM-4.5, ...; auxiliary-loss-free balancing). Megatron's rate is 1e-3; by default
            biases keep their loaded values.
        router_replay (`bool`, defaults to `False`): reuse the experts chosen during generation in TRL's GRPO or RLOO
            for the losses (R3, Ma et al., 2025), even if weights have changed since.
        frozen_models (`dict`, *optional*): layouts of frozen models that a trainer loads in addition to the trained
            one: `"reference"`, `"reward"` or `"teacher"` -> the fields in which its layout differs, such as
            `{"reference": {"zero_stage": 3}}`.
        strict_loading (`bool`, defaults to `True`): missing, surplus or mis-shaped weights raise. With `False` missing
            weights are initialized as in training from scratch, for example a new classification head.
        unverified (`str`, defaults to `"check"`): what happens to a model and layout without a recorded parity result.
            `"check"` compares a tiny model with a single process first and raises if they differ; `"raise"` raises;
            `"allow"` loads it with a warning.
        seed (`int`, *optional*): seed of models created by `from_config`, which then hold one layer at a time in full;
            the same seed gives the same global weights on every layout. `None`: the first rank draws the full model
            from torch's generator, with a single process's weights.
        timeout (`float`, defaults to 1800): seconds a collective may take before the job is aborted.

    Raises:
        ConfigError: a value is out of range; names the field.
    """

    tp_size: int = 1
    sequence_parallel: bool = False
    shard_saved_activations: bool | None = None
    dp_size: int | None = None
    zero_stage: int = 1
    dp_replicate_size: int = 1
    bucket_size: int | None = None
    fp32_main_params: bool = True
    max_skipped_steps: int = 10
    offload_optimizer: bool = False
    async_save: bool = False
    verify_checksums: bool = True
    recompute: str | None = None
    offload_activations: bool = False
    mlp_chunk_size: int | None = None
    gradient_clipping: float | None = None
    pp_size: int = 1
    num_microbatches: int | None = None
    pipeline_schedule: str = "1f1b"
    virtual_stages: int | None = None
    pipeline_partition: str | tuple[int, ...] = "cost"
    cp_size: int = 1
    cp_comm_type: str | None = None
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    ep_size: int = 1
    etp_size: int | None = None
    loss_chunk_size: int | None = None
    router_aux_loss_scope: str = "batch"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    router_replay: bool = False
    frozen_models: Mapping[str, Mapping[str, Any]] | None = field(default=None, hash=False)
    strict_loading: bool = True
    unverified: str = "check"
    seed: int | None = None
    timeout: float = 1800.0

    def __new__(cls, *args: Any, **kwargs: Any) -> "MegatronConfig":
        cls._reject_unknown(kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for names, is_valid, expected in _FIELD_CHECKS:
            for name in names:
                if not is_valid(getattr(self, name)):
                    raise ConfigError(f"MegatronConfig.{name} = {getattr(self, name)!r}: expected {expected}.")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
                raise ConfigError(f"MegatronConfig.{name} = {getattr(self, name)!r}: expected {listed}.")
        if self.shard_saved_activations and not self.sequence_parallel:
            raise ConfigError("MegatronConfig.shard_saved_activations = True: needs sequence_parallel=True.")
        if self.offload_activations and self.recompute != "full":
            raise ConfigError("MegatronConfig.offload_activations = True: needs recompute='full'.")
        if self.mlp_chunk_size is not None and self.sequence_parallel:
            raise ConfigError(
                f"MegatronConfig.mlp_chunk_size = {self.mlp_chunk_size} is not supported with sequence_parallel=True, "
                "which shards tokens over the tp ranks around an MLP. Set only one of them, or shard tokens with "
                "cp_size instead."
            )
        self._check_partition()
        self._check_context()
        self._check_frozen()
        default_etp_size = 1 if self.ep_size > 1 else self.tp_size
        if self.etp_size not in (None, default_etp_size, self.tp_size):
            raise ConfigError(
                f"MegatronConfig.etp_size = {self.etp_size}: expected {default_etp_size} or tp_size = {self.tp_size}"
                + (", with ep_size = 1 the tp ranks split every expert." if self.ep_size == 1 else ".")
            )
        if self.dp_size is not None and self.dp_size % (copies := self.dp_replicate_size):
            raise ConfigError(f"MegatronConfig.dp_replicate_size = {copies}: does not divide dp_size = {self.dp_size}.")
        if self.sequence_parallel and self.tp_size == 1:
            raise ConfigError(
                "MegatronConfig.sequence_parallel = True: needs tp_size of 2 or more, the sequence is split over the "
                "tp ranks (tp_size = 1)."
            )

    def _check_context(self) -> None:
        sizes, name = self.hierarchical_context_parallel_sizes, "MegatronConfig.hierarchical_context_parallel_sizes"
        if isinstance(sizes, list):
            sizes = tuple(sizes)
            object.__setattr__(self, "hierarchical_context_parallel_sizes", sizes)
        if sizes is None:
            return
        if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise ConfigError(f"{name} = {sizes!r}: expected two sizes, such as [2, 4].")
        if self.cp_comm_type != "a2a+p2p":
            raise ConfigError(f"{name} = {sizes}: needs cp_comm_type='a2a+p2p', which is {self.cp_comm_type!r}.")
        if math.prod(sizes) != self.cp_size:
            raise ConfigError(f"{name} = {sizes}: {sizes[0]} x {sizes[1]} is not cp_size = {self.cp_size}.")

    def _check_frozen(self) -> None:
        if self.frozen_models is None:
            return
        if not isinstance(self.frozen_models, Mapping) or not all(
            isinstance(one, Mapping) for one in self.frozen_models.values()
        ):
            raise ConfigError(
                f"MegatronConfig.frozen_models = {self.frozen_models!r}: expected a mapping of model names to layout "
                'fields, such as {"reference": {"zero_stage": 3}}.'
            )
        for name in self.frozen_models:
            if name not in FROZEN:
                raise ConfigError(f"MegatronConfig.frozen_models has {name!r}; valid: {', '.join(FROZEN)}.")
            ranks = self.get_frozen_config(name).ranks_per_replica
            if self.ranks_per_replica % ranks:
                raise ConfigError(
                    f"MegatronConfig.frozen_models[{name!r}]: its {ranks} ranks per replica (tp_size x cp_size x "
                    f"pp_size) must divide the {self.ranks_per_replica} ranks per replica of the trained model."
                )

    def get_frozen_config(self, name: str) -> "MegatronConfig":
        """Returns the layout of a frozen model of `FROZEN`, which a trainer loads in addition to the trained one."""
        fields = dict((self.frozen_models or {}).get(name, {}))
        if {"tp_size", "cp_size", "pp_size"} & set(fields):
            # Smaller model-parallel groups leave more data-parallel ranks.
            fields.setdefault("dp_size", None)
        # Validates field names, with suggestions for misspelled ones.
        self.from_dict(fields)
        return dataclasses.replace(self, **({"frozen_models": None} | fields))

    def _check_partition(self) -> None:
        value = self.pipeline_partition
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, "pipeline_partition", value)
        counts = isinstance(value, tuple) and value and all(type(count) is int and count > 0 for count in value)
        if not counts and value not in PARTITIONS:
            raise ConfigError(
                f"MegatronConfig.pipeline_partition = {value!r}: expected 'cost', 'layers' or the number of layers of "
                "each stage, such as [5, 3]."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MegatronConfig":
        """Creates a config from a mapping of field names; an unknown field raises `ConfigError` with close matches."""
        cls._reject_unknown(values)
        return cls(**values)

    @classmethod
    def _reject_unknown(cls, values: Mapping[str, Any]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name in known:
                continue
            if "compute_environment" in values or "distributed_type" in values:
                raise ConfigError(
                    "megatron_config is an Accelerate config file. Pass it to accelerate launch --config_file, and "
                    "leave megatron_config out or use hf_megatron.config_from_environment()."
                )
            near = difflib.get_close_matches(str(name), known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(known)}."
            raise ConfigError(f"MegatronConfig has no field {name!r} (value {values[name]!r}); {hint}")

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> "MegatronConfig":
        """Creates a config from the fields in a file of this library, which may use earlier field names."""
        known = {name: value for name, value in values.items() if name not in _REMOVED_NAMES}
        return cls.from_dict({_EARLIER_NAMES.get(name, name): value for name, value in known.items()})

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> "MegatronConfig":
        """Creates a config from a YAML file with a mapping of field names."""
        import yaml

        try:
            with open(path, encoding="utf-8") as file:
                values = yaml.safe_load(file)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"{os.fspath(path)}: cannot be read as a YAML file of MegatronConfig fields: {error}"
            ) from error
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{os.fspath(path)}: expected a mapping of MegatronConfig fields, got {type(values).__name__}."
            )
        return cls.from_dict(values)

    @classmethod
    def from_megatron_args(cls, arguments: Mapping[str, Any]) -> "MegatronConfig":
        """Creates a config from Megatron-LM's argument names, with or without dashes (`--sequence-parallel`)."""
        if not isinstance(arguments, Mapping):
            raise ConfigError(
                f"from_megatron_args takes a mapping of argument names to values, got {type(arguments).__name__}."
            )
        values = {}
        for name, value in arguments.items():
            key = name.lstrip("-").replace("-", "_")
            if key not in MEGATRON_ARGUMENTS:
                near = difflib.get_close_matches(key, MEGATRON_ARGUMENTS, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(MEGATRON_ARGUMENTS)}."
                raise ConfigError(
                    f"Megatron argument {name!r} (value {value!r}) has no equivalent in MegatronConfig; {hint}"
                )
            if key == "use_distributed_optimizer":
                if value not in (False, True):
                    raise ConfigError(f"Megatron argument {name!r} = {value!r}: expected True or False.")
                value = int(value)
            values[MEGATRON_ARGUMENTS[key]] = value
        if values.get("ep_size", 1) != 1:
            # Megatron splits experts over its tp ranks by default.
            values.setdefault("etp_size", values.get("tp_size", 1))
        return cls.from_dict(values)

    @classmethod
    def coerce(cls, value: "MegatronConfig | Mapping[str, Any] | str | os.PathLike[str]") -> "MegatronConfig":
        """Converts any value of `megatron_config=` to a config: a config, a mapping, or the path of a YAML file."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, str | os.PathLike):
            return cls.from_yaml(value)
        raise ConfigError(
            f"megatron_config = {value!r}: expected a MegatronConfig, a dict or the path of a YAML file, got "
            f"{type(value).__name__}."
        )

    @property
    def is_parallel(self) -> bool:
        """Whether any axis has more than one rank."""
        return self.ranks_per_replica * (self.dp_size or 1) > 1

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold one model replica: tp x cp x pp."""
        return self.tp_size * self.cp_size * self.pp_size

    def packs_activations(self, backend: str) -> bool:
        """Returns whether saved activations are sharded if the tp ranks communicate over this torch backend."""
        is_on = self.shard_saved_activations
        return self.sequence_parallel and backend != "gloo" if is_on is None else is_on

    def layout(self) -> str:
        """Returns the short name of the layout, for example `tp2+sp+pp2+dp2+zero1`."""
        name = f"tp{self.tp_size}" + ("+sp" if self.sequence_parallel else "")
        name += f"+cp{self.cp_size}" if self.cp_size > 1 else ""
        name += f"+pp{self.pp_size}" if self.pp_size > 1 else ""
        name += f"+ep{self.ep_size}" if self.ep_size > 1 else ""
        name += f"+etp{self.etp_size}" if self.ep_size > 1 and (self.etp_size or 1) > 1 else ""
        return name + (f"+dp{self.dp_size}+zero{self.zero_stage}" if (self.dp_size or 1) > 1 else "")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"


def validate_world_size(config: MegatronConfig, world_size: int) -> int:
    """Returns the job's data-parallel size; raises `ConfigError` with the launch command or valid sizes."""
    replica = config.ranks_per_replica
    sizes = f"tp_size={config.tp_size} x cp_size={config.cp_size} x pp_size={config.pp_size} = {replica} ranks"
    if replica > world_size:
        raise ConfigError(
            f"MegatronConfig needs {sizes}, the job has {world_size}. Start it with\n"
            f"    torchrun --nproc_per_node {replica} train.py\n"
            f"or `accelerate launch --config_file megatron.yaml train.py` with `distributed_type: MEGATRON_LM` and\n"
            f"`num_processes: {replica}` in the file (on CPUs `--cpu --num_processes` alone starts one process)."
        )
    if world_size % replica:
        raise ConfigError(
            f"MegatronConfig needs {sizes}, which does not divide the job's {world_size} ranks; valid world sizes: "
            f"multiples of {replica}."
        )
    dp_size = world_size // replica
    if config.dp_size not in (None, dp_size):
        raise ConfigError(
            f"MegatronConfig.dp_size = {config.dp_size}: {world_size} ranks / {replica} leave dp_size = {dp_size}. "
            f"Leave dp_size out, or start {replica * config.dp_size} ranks."
        )
    if dp_size % config.dp_replicate_size:
        raise ConfigError(
            f"MegatronConfig.dp_replicate_size = {config.dp_replicate_size}: does not divide dp_size = {dp_size} "
            f"({world_size} ranks / {replica})."
        )
    return dp_size
