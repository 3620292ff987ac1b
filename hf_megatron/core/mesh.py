"""`ParallelMesh`: the axes of a layout with the process groups along them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compat.shared import Shared
from ..compat.torch_dtensor import flat_mesh, root_mesh, split_mesh_axis
from ..errors import UnsupportedError
from .axes import Axes, Axis
from .placement import Placement
from .runtime import RUNTIME

# Outermost first, the order of DeviceMesh.
WORLD_AXES = ("dp", "pp", "cp", "tp")
_MARK = "_hf_megatron"


class ParallelMesh(Shared):
    """Device mesh of a job, with its sub-meshes and process groups.

    Args:
        axes (`Axes`): axes of the world, for this rank.
        device_type (`str`): `"cpu"` or `"cuda"`.

    Process groups cannot be copied; a deep copy of a model shares its mesh.
    """

    @classmethod
    def get_or_create(cls, axes: Axes, device_type: str) -> "ParallelMesh":
        """Returns this job's mesh for a layout; models of one layout share it, including models created sequentially.

        A mesh holds file descriptors and threads, and cannot be freed with its model: torch considers meshes of equal
        ranks and names equal (`DeviceMesh.__eq__`) and keeps the first one in DTensor's caches, so operations on a
        later model's weights may use an earlier model's groups.
        """
        kept = {key: mesh for key, mesh in RUNTIME.meshes.items() if mesh.job is dist.group.WORLD}
        # Drop meshes whose process groups belong to a finished job.
        RUNTIME.meshes = kept
        key = axes, device_type
        if key not in kept:
            kept[key] = cls(axes, device_type)
        return kept[key]

    def __init__(self, axes: Axes, device_type: str):
        self.axes = axes
        self.job = dist.group.WORLD
        self.is_announced = False
        self.device_type = device_type
        sizes = tuple(axes.size(name) for name in WORLD_AXES)
        self.root = init_device_mesh(device_type, sizes, mesh_dim_names=WORLD_AXES)
        setattr(self.root, _MARK, True)
        self.tp: DeviceMesh = self.root["tp"]
        # Read in every forward of every module, so looked up only once.
        self.tp_size, self.tp_rank = axes.size("tp"), axes.rank("tp")
        self.tp_group: dist.ProcessGroup = self.tp.get_group()
        self.pp_size, self.pp_rank = axes.size("pp"), axes.rank("pp")
        self.pp_group: dist.ProcessGroup = self.root["pp"].get_group()
        self.dp_size, self.dp_rank = axes.size("dp"), axes.rank("dp")
        self.dp_group: dist.ProcessGroup = self.root["dp"].get_group()
        # Ranks that process different data reduce the gradients of the parameters they share.
        repeats_experts = axes.size("ep") > 1 and axes.size("edp") > 1
        self.reduces_gradients = axes.size("dp_cp") > 1 or repeats_experts
        halves = axes.size("dp_replicate"), axes.size("dp_shard")
        self.dp = split_mesh_axis(self.root["dp"], halves, ("dp_replicate", "dp_shard"))
        self._with_copies: dict[int, DeviceMesh] = {}
        self._meshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._host_groups: dict[Axis, dist.ProcessGroup] = {}
        self._direction_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def device(self) -> torch.device:
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    def group(self, name: str) -> dist.ProcessGroup:
        """Returns the process group of an axis; the first call for an axis outside the world mesh is collective."""
        if self.axes.size("cp") == 1:
            name = name.replace("dp_cp", "dp")
        if name in ("dp_shard", "dp_replicate"):
            return self.dp.get_group(name)
        same = next((other for other in WORLD_AXES if self.axes[other] == self.axes[name]), None)
        return self._build_mesh(name).get_group() if same is None else self.root.get_group(same)

    def host_group(self, name: str) -> dist.ProcessGroup:
        """Returns the process group of an axis for host tensors; the first call is collective."""
        group, axis = self.group(name), self.axes[name]
        # A fake group accepts tensors of any device.
        if axis.size == 1 or "gloo" in dist.get_backend(group) or dist.get_backend(group) == "fake":
            return group
        if axis not in self._host_groups:
            groups = [list(ranks) for ranks in self.axes.groups(name)]
            subgroups = dist.new_subgroups_by_enumeration(groups, backend="gloo", group_desc=f"hosts of {name}")
            self._host_groups[axis] = subgroups[0]
        return self._host_groups[axis]

    def direction_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Returns the process groups for a pipeline's activations and their gradients; the first call is collective.

        gloo distinguishes messages by tags and sends them side by side: both are the pipeline's group. NCCL runs the
        messages of a communicator in the order of the program, where an activation would wait for a gradient. From
        separate groups torch creates one communicator for each pair of neighbors and direction.
        """
        if self._direction_groups is None:
            self._direction_groups = self.pp_group, self.pp_group
            if self.pp_size > 1 and dist.get_backend(self.pp_group) not in ("gloo", "fake"):
                self._direction_groups = self._split_directions()
        return self._direction_groups

    def _split_directions(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        groups = [list(ranks) for ranks in self.axes.groups("pp")]
        forward, backward = (
            dist.new_subgroups_by_enumeration(groups, group_desc=f"pipeline {what}")[0]
            for what in ("activations", "gradients")
        )
        return forward, backward

    def of(self, placement: Placement, copies: int = 1) -> DeviceMesh:
        """Returns the DTensor mesh for a placement; collective, with the same placements on every rank.

        Args:
            copies (`int`, defaults to 1): tp ranks that hold the same shard (`placement.count_shared_copies`).
        """
        names = tuple(split.axis for split in placement.splits)
        if "ep" in names:
            return self._build_mesh("edp", *names)[names]
        if any(name != "tp" for name in names):
            return self._build_mesh(*names)
        num_copies = max([split.copies for split in placement.splits], default=1)
        return self.tp_with_copies(copies if num_copies in (1, self.tp_size) else num_copies)

    def tp_with_copies(self, copies: int) -> DeviceMesh:
        """Splits tp into `tp_shard` x `tp_copy`, where `copies` neighboring ranks hold the same shard."""
        if copies in (1, self.tp_size):
            return self.tp
        if copies not in self._with_copies:
            sizes = self.tp_size // copies, copies
            self._with_copies[copies] = split_mesh_axis(self.tp, sizes, ("tp_shard", "tp_copy"))
        return self._with_copies[copies]

    def copies_group(self, copies: int) -> dist.ProcessGroup:
        """Returns the process group of the ranks that hold the same shard as this one."""
        return self.tp_group if copies == self.tp_size else self.tp_with_copies(copies).get_group("tp_copy")

    def weight_shards(self) -> DeviceMesh:
        """Returns the mesh over which ZeRO-3 shards weights: `dp_cp_shard`, outside of it `dp_cp_replicate`."""
        if self.axes.size("dp_cp_replicate") == 1:
            return flat_mesh(self.root, ("dp", "cp")) if self.axes.size("cp") > 1 else self.root["dp"]
        if self.axes.size("cp") == 1:
            return self.dp
        raise UnsupportedError(
            "MegatronConfig.dp_replicate_size > 1 with zero_stage=3 and cp_size > 1 is not supported: weights are "
            "sharded over the dp and cp ranks together. Set dp_replicate_size=1 or zero_stage=2."
        )

    def expert_shards(self, placement: Placement) -> DeviceMesh:
        """Returns the mesh over which ZeRO-3 shards experts with this placement."""
        if self.axes.size("edp_replicate") > 1:
            raise UnsupportedError(
                "MegatronConfig.dp_replicate_size > 1 with zero_stage=3 and ep_size > 1 is not supported: experts are "
                "sharded over all their replicas. Set dp_replicate_size=1 or zero_stage=2."
            )
        return self._build_mesh("edp", *(split.axis for split in placement.splits))["edp"]

    def _build_mesh(self, *names: str) -> DeviceMesh:
        """Builds a mesh from axes outside the world mesh."""
        key = tuple(self.axes[name] for name in names)
        if key not in self._meshes:
            joined_axis = key[0].joined(*key[1:])
            first_ranks = sorted({joined_axis.ranks(rank)[0] for rank in range(self.axes.size("world"))})
            ranks = torch.tensor([_grid(key, first) for first in first_ranks])
            mesh = DeviceMesh(self.device_type, ranks, mesh_dim_names=("others", *names))
            setattr(mesh, _MARK, True)
            self._meshes[key] = mesh[names]
        return self._meshes[key]


def is_weight_axis(name: str) -> bool:
    """Returns whether ZeRO-3 shards weights along the mesh axis of this name."""
    return name.startswith(("dp", "edp"))


def is_layout_mesh(mesh: DeviceMesh) -> bool:
    """Returns whether a mesh was derived from one of this library's meshes, including FSDP2's."""
    return _MARK in vars(root_mesh(mesh))


def _grid(axes: tuple[Axis, ...], first: int) -> list:
    """Nests the ranks along the axes through `first`, in the layout of a mesh tensor."""
    if not axes:
        return first  # type: ignore[return-value]
    return [_grid(axes[1:], rank) for rank in axes[0].ranks(first)]
