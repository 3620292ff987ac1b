"""`ParallelMesh`: the ranks of a job as axes. world = tp x cp x pp x dp, tp innermost, dp outermost.

transformers' own mesh and Megatron's default put pp outermost; dp is outermost here because Trainer's and
Accelerate's data arithmetic then holds unchanged: neighbouring ranks share a batch.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .config import MegatronConfig
from .errors import ConfigError
from .upstream import split_mesh_axis

# Outermost first, as DeviceMesh wants them.
AXES = ("dp", "pp", "cp", "tp")


def validate_world_size(config: MegatronConfig, world_size: int) -> int:
    """Returns the data parallel size of the job, or raises before anything is loaded.

    Raises:
        ConfigError: the sizes need more ranks than the job has, or do not divide the world; prints the launch command.
    """
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
            f"MegatronConfig.dp_size = {config.dp_size}: {world_size} ranks / {replica} leave dp_size = {dp_size}."
        )
    if dp_size % config.dp_replicate_size:
        raise ConfigError(
            f"MegatronConfig.dp_replicate_size = {config.dp_replicate_size}: does not divide dp_size = {dp_size} "
            f"({world_size} ranks / {replica})."
        )
    return dp_size


class ParallelMesh:
    """The device mesh of a job and the groups cut from it.

    Args:
        config (`MegatronConfig`): the sizes.
        device_type (`str`): `"cpu"` or `"cuda"`.

    Process groups cannot be copied; a deep copy of a model shares its mesh.
    """

    def __init__(self, config: MegatronConfig, device_type: str):
        dp_size = validate_world_size(config, dist.get_world_size())
        self.device_type = device_type
        self.root = init_device_mesh(
            device_type, (dp_size, config.pp_size, config.cp_size, config.tp_size), mesh_dim_names=AXES
        )
        self.tp: DeviceMesh = self.root["tp"]
        # Read on every forward of every module, so looked up once.
        self.tp_size: int = self.tp.size()
        self.tp_rank: int = self.tp.get_local_rank()
        self.tp_group: dist.ProcessGroup = self.tp.get_group()
        self.pp_size: int = config.pp_size
        self.pp_rank: int = self.root["pp"].get_local_rank()
        self.pp_group: dist.ProcessGroup = self.root["pp"].get_group()
        self.dp_size: int = dp_size
        self.dp_rank: int = self.root["dp"].get_local_rank()
        self.dp_group: dist.ProcessGroup = self.root["dp"].get_group()
        # Stage 0 shares nothing: every dp rank is a replica.
        replicas = dp_size if config.zero_stage == 0 else config.dp_replicate_size
        self.dp = split_mesh_axis(self.root["dp"], (replicas, dp_size // replicas), ("dp_replicate", "dp_shard"))
        self.shard_size: int = self.dp["dp_shard"].size()
        self.shard_rank: int = self.dp["dp_shard"].get_local_rank()
        self.shard_group: dist.ProcessGroup = self.dp.get_group("dp_shard")
        self.replicate_group: dist.ProcessGroup = self.dp.get_group("dp_replicate")
        self.replicate_size: int = replicas
        self.replicate_rank: int = self.dp["dp_replicate"].get_local_rank()
        self._copies: dict[int, tuple[DeviceMesh, dist.ProcessGroup]] = {}

    def __deepcopy__(self, memo: dict) -> "ParallelMesh":
        return self

    @property
    def device(self) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def tp_with_copies(self, copies: int) -> DeviceMesh:
        """The tp axis as two: `tp_shard` x `tp_copy`, where `copies` neighbouring ranks hold the same shard."""
        if copies not in self._copies:
            axes = split_mesh_axis(self.tp, (self.tp_size // copies, copies), ("tp_shard", "tp_copy"))
            self._copies[copies] = axes, axes.get_group("tp_copy")
        return self._copies[copies][0]

    def copies_group(self, copies: int) -> dist.ProcessGroup:
        """The ranks that hold the same shard as this one."""
        self.tp_with_copies(copies)
        return self._copies[copies][1]
