"""A mesh of devices, and the run of a whole model on one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bexp.explorer.dimensions.parallelism import Parallelism
from bexp.explorer.records.plan import SharedRun


class Mesh(Parallelism):
    """The devices of a request by axes: its sizes, with their number, and the groups within it."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.tensor * self.pipeline * self.data

    @property
    def in_plain_mode(self) -> Mesh:
        """The same mesh with expert mode `plain`."""
        return self.model_copy(update={"overlap_degree": 1, "shadowed_experts": 0})

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes of the mesh that a component of the experts names."""
        return {
            "expert_parallel_size": self.expert,
            "overlap_degree": self.overlap_degree,
            "shadowed_experts": self.shadowed_experts,
        }

    @property
    def block_key(self) -> tuple[int, ...]:
        """The sizes on which the blocks of a device depend; pipeline and data parallelism are not among them."""
        return self.tensor, self.expert, self.overlap_degree, self.shadowed_experts

    @property
    def family(self) -> tuple[object, ...]:
        """The mesh without the numbers of its expert mode: meshes that a search first ranks as one."""
        sizes = (self.tensor, self.pipeline, self.virtual_stages, self.expert, self.data)
        return *sizes, self.schedule, self.sharding, self.expert_mode

    @property
    def expert_data(self) -> int:
        """Devices that hold the same experts of a stage."""
        return self.tensor * self.data // self.expert if self.expert > 1 else self.data


class MeshRun(SharedRun):
    """A whole model on a mesh of devices: how many layers each stage has, and how many micro-batches its step has."""

    mesh: Mesh
    layers_per_stage: tuple[int, ...]
    num_micro_batches: Annotated[int, Field(ge=1)] = Field(description="Of one replica.")

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The groups of devices that exchange something: their size, and how far apart their members are."""
        mesh, ends = self.mesh, self.mesh.tensor * self.mesh.data
        groups = [(mesh.tensor, 1), (mesh.data, mesh.tensor), (mesh.pipeline, ends), (2, (mesh.pipeline - 1) * ends)]
        groups += [(mesh.expert, 1), (mesh.expert_data, mesh.expert)] if mesh.expert > 1 else []
        return tuple(dict.fromkeys(group for group in groups if group[0] > 1 and group[1] > 0))
