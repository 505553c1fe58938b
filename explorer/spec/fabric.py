"""What links devices, described where nobody has measured it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from bexp.explorer.spec.base import Frozen, RuleError
from bexp.explorer.spec.spelling import did_you_mean

Rate = Annotated[float, Field(gt=0, le=1e6)]
Latency = Annotated[float, Field(ge=0, le=1e6)]


class LinkSpec(Frozen):
    """What one device sends and receives at the same time over its links."""

    gigabytes_per_second: Rate = Field(description="Of one device, each way, as collectives reach it.")
    microseconds: Latency = Field(description="From the beginning of a transfer to its first byte.")


class NodeSpec(LinkSpec):
    """The links between the devices of one host."""

    devices: Annotated[int, Field(ge=1, le=4096)]


class FabricSpec(Frozen):
    """The links of a machine that a plan is for. `inter_node` may be null if one node has all the devices."""

    intra_node: NodeSpec
    inter_node: LinkSpec | None = None

    def check(self, num_devices: int) -> None:
        """Check that every link that so many devices need has a rate.

        Raises:
            RuleError: the link between nodes is missing.
        """
        if self.inter_node is None and num_devices > self.intra_node.devices:
            raise RuleError(
                f"fabric.inter_node is missing: num_devices ({num_devices}) exceeds the {self.intra_node.devices} "
                "devices of a node; give its gigabytes_per_second and microseconds",
                "fabric",
                "num_devices",
            )


def _described(devices: int, intra: float, inter: float) -> dict[str, Any]:
    return {
        "intra_node": {"devices": devices, "gigabytes_per_second": intra, "microseconds": 5.0},
        "inter_node": {"gigabytes_per_second": inter, "microseconds": 10.0},
    }


FABRICS = {
    "h100-nvl-ib400": _described(8, 450.0, 50.0),
    "h200-nvl-ib400": _described(8, 450.0, 50.0),
    "b200-nvl-ib400": _described(8, 900.0, 50.0),
    "a100-nvl-ib200": _described(8, 300.0, 25.0),
}
"""Rates by name, as the vendor's data sheets state them: NVLink 3, 4 or 5 in a node of 8 GPUs, and an InfiniBand
adapter of 200 or 400 Gb/s for each GPU. Collectives reach less, so that plans with them are optimistic."""


def expand_fabric(data: dict[str, Any]) -> dict[str, Any]:
    """Replace the name of a fabric by its links.

    Raises:
        RuleError: no fabric has this name.
    """
    name = data.get("fabric")
    if not isinstance(name, str):
        return data
    if name not in FABRICS:
        raise RuleError(
            f"fabric '{name}' is not known{did_you_mean(name, FABRICS)}; there are {', '.join(FABRICS)}, or give "
            "intra_node and inter_node",
            "fabric",
        )
    return {**data, "fabric": FABRICS[name]}
