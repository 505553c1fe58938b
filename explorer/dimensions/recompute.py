"""The recomputation policy: which activations are recomputed in backward."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler

from bexp.explorer.dimensions.dimension import Change, Column, Dimension, Point, Term, column_of
from bexp.explorer.dimensions.execution import EXECUTION, Execution
from bexp.explorer.dimensions.place import EmptySpaceError, Place, ReportedPlace
from bexp.explorer.dimensions.sharding import SHARDING
from bexp.explorer.model.base import Frozen, RuleError, is_null
from bexp.explorer.model.hardware import DeviceSupport
from bexp.explorer.model.model import LayerKind, ModelSpec
from bexp.explorer.model.parts import ExploredModel, ModelParts
from bexp.explorer.model.spelling import shortened
from bexp.explorer.model.target import TRANSFORMERS
from bexp.explorer.model.training import Sharding

if TYPE_CHECKING:
    from bexp.explorer.dimensions.candidate import Candidate

_NUMBERED = re.compile(r"(layers|groups)_([1-9][0-9]{0,3})")


class Recompute(StrEnum):
    """The activations that are recomputed in backward (Korthikanti et al., 2022, arXiv:2205.05198).

    Some policies choose by operation, in every layer; of these the cheapest comes first. Others choose by layer.
    `layers_N` recomputes the first N layers, each by itself (Megatron's method `block`). `groups_N` recomputes groups
    of N consecutive layers, each as one: it keeps the input of a group (Megatron's method `uniform`).
    """

    NONE = "none"
    SELECTIVE = "selective"
    """The attention core."""
    ACTIVATIONS = "activations"
    """All but the results of matrix products and of attention:

    norms, activation functions with the gate, and the gathering of tokens for experts. Expert GEMMs do not run again.
    """
    QKV = "qkv"
    """The norm, the projection of queries, keys and values, and their rotation.

    The result and the log-sum-exp of attention are kept, so its kernel does not run again.
    """
    EXPERTS = "experts"
    """The expert FFN up to its second GEMM, whose result backward does not need."""
    PROJECTIONS = "projections"
    """`qkv`, and the same for every FFN: only the results of attention and of blocks are kept."""
    PARTIAL_25 = "partial_25"
    """A quarter of the layers, each as a whole."""
    PARTIAL_50 = "partial_50"
    PARTIAL_75 = "partial_75"
    FULL = "full"
    """Every layer as a whole."""
    OFFLOAD = "offload"
    """Nothing:

    what layers keep lies in pinned memory of the host from forward to backward (Rhu et al., 2016, arXiv:1602.08124). It
    is explored if a request names it, or if nothing else may fit.
    """

    @classmethod
    def _missing_(cls, value: object) -> Recompute | None:
        """Return the policy of a name with a number, such as `layers_12`; None for any other name.

        These policies are no members, so an iteration leaves them out. There is one object for each name, so that `is`
        compares them as it compares members.
        """
        if not isinstance(value, str) or not _NUMBERED.fullmatch(value):
            return None
        policy = str.__new__(cls, value)
        policy._name_ = value.upper()
        policy._value_ = value
        known: Recompute = cls._value2member_map_.setdefault(value, policy)  # type: ignore[assignment]  # typed for any enum
        return known

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Add the names with a number to those that JSON Schema admits."""
        values = handler(schema)
        members = handler.resolve_ref_schema(values)
        if "enum" in members:
            names = members.pop("enum")
            members["anyOf"] = [{"enum": names}, {"pattern": f"^{_NUMBERED.pattern}$"}]
        return values

    @property
    def first_layers(self) -> int | None:
        """N of `layers_N`; None for any other policy."""
        return self._number("layers")

    @property
    def group_size(self) -> int | None:
        """N of `groups_N`; None for any other policy."""
        return self._number("groups")

    @property
    def is_numbered(self) -> bool:
        """Whether the name has a number. Such a policy is explored only if a request names it."""
        return _NUMBERED.fullmatch(self) is not None

    @property
    def rank(self) -> tuple[int, int]:
        """The place in a list of policies: members as they are declared, then `layers_N`, then `groups_N`."""
        members = list(Recompute)
        if not self.is_numbered:
            return members.index(self), 0
        return len(members) + (self.first_layers is None), self.first_layers or self.group_size or 0

    def _number(self, kind: str) -> int | None:
        match = _NUMBERED.fullmatch(self)
        return int(match[2]) if match and match[1] == kind else None

    @property
    def by_operation(self) -> bool:
        """Whether the policy chooses operation by operation what to keep, rather than by kernel or layer."""
        return self in {Recompute.ACTIVATIONS, Recompute.QKV, Recompute.EXPERTS, Recompute.PROJECTIONS}

    @property
    def untiled_only(self) -> bool:
        """Whether the policy keeps a part of attention.

        A tile recomputes all of attention, so the two exclude each other.
        """
        return self in {Recompute.SELECTIVE, Recompute.QKV, Recompute.PROJECTIONS, Recompute.OFFLOAD}

    @property
    def layer_share(self) -> float:
        """The share of the layers that the policy recomputes as a whole; 0 for `layers_N`, which names a number."""
        if self.group_size is not None:
            return 1.0
        return {
            Recompute.PARTIAL_25: 0.25,
            Recompute.PARTIAL_50: 0.5,
            Recompute.PARTIAL_75: 0.75,
            Recompute.FULL: 1.0,
        }.get(self, 0.0)


ON_DEVICE = tuple(policy for policy in Recompute if policy is not Recompute.OFFLOAD)
"""Policies without a number that leave activations on the device: those that are explored where none is named."""


def _explain_number(name: Any) -> Any:
    """Say what a name with a number may be, which the list of members does not."""
    if isinstance(name, str) and name.startswith(("layer", "group")) and not _NUMBERED.fullmatch(name):
        raise ValueError(
            f"'{shortened(name)}' is no policy; with a number there are 'layers_N' or 'groups_N', and N is at least 1 "
            "and at most the number of layers"
        )
    return name


Policy = Annotated[Recompute, BeforeValidator(_explain_number)]
"""A policy by its name, as a request gives it."""


def refuse_number(recompute: Recompute, num_layers: int) -> None:
    """Raise ValueError if a model with so many layers has no policy of this number."""
    first, size = recompute.first_layers, recompute.group_size
    if first is not None and first > num_layers:
        raise ValueError(f"recompute '{recompute}': the model has {num_layers} layers; the nearest policy is 'full'")
    if size == 1:
        raise ValueError(f"recompute '{recompute}': a group has at least two layers; one by one is the policy 'full'")
    if size is not None and size > num_layers:
        nearest = f"groups_{num_layers}" if num_layers > 1 else "full"
        raise ValueError(
            f"recompute '{recompute}': the model has {num_layers} layers; the nearest policy is '{nearest}'"
        )


def offers_policy(model: ExploredModel, policy: Recompute, *, named: bool) -> bool:
    """Return whether a policy is to be tried: all in the reference layers, those that it can run in a model's own code.

    In a model's own code, two kinds of policy must be `named` by the request: those that choose by operation, and
    `offload`. `layers_N` needs layers that can be recomputed one by one.
    """
    if isinstance(model, ModelSpec):
        return True
    can = (policy if policy.first_layers is None else Recompute.PARTIAL_50) in model.policies
    return can and (named or not (policy.untiled_only or policy.by_operation))


def recomputed_layers(model: ExploredModel, recompute: Recompute) -> tuple[bool, ...]:
    """Return, for each layer, whether `recompute` recomputes it as a whole.

    `layers_N` takes the first layers, and so does a share in a model's own code. In the reference layers the recomputed
    ones are spread evenly over each kind of layer. A partial policy then means the same share of dense and of expert
    layers. Every partial policy recomputes at least one layer.
    """
    if not isinstance(model, ModelSpec):
        share = recompute.layer_share
        number = recompute.first_layers or (max(1, round(share * model.num_layers)) if share > 0 else 0)
        return tuple(i < number for i in range(model.num_layers))
    kinds = model.layer_kinds
    if recompute.first_layers is not None:
        return tuple(i < recompute.first_layers for i in range(len(kinds)))
    chosen = [False] * len(kinds)
    for kind, count in zip(LayerKind, _count_recomputed(model, recompute), strict=True):
        indices = [i for i, k in enumerate(kinds) if k is kind]
        for j in range(count):
            chosen[indices[j * len(indices) // count]] = True
    return tuple(chosen)


def _count_recomputed(model: ModelSpec, recompute: Recompute) -> tuple[int, ...]:
    """Return how many layers of each kind a policy without a number recomputes as a whole."""
    share = recompute.layer_share
    counts = [model.count_layers(kind) for kind in LayerKind]
    return tuple(max(1, round(share * count)) if share > 0 and count else 0 for count in counts)


def in_order(policies: Collection[Recompute]) -> tuple[Recompute, ...]:
    """Return the distinct policies, ordered by `Recompute.rank`."""
    return tuple(sorted(set(policies), key=lambda policy: policy.rank))


def distinct_policies(model: ModelSpec | None, allowed: Collection[Recompute]) -> tuple[Recompute, ...]:
    """Return the policies of `allowed` without those that recompute the same layers as another.

    In a shallow model some shares round to the same layers. One of these shares is enough, and `full` goes before a
    part. Shares that recompute equally many layers of each kind recompute the same ones, so the layers are not compared
    one by one. The time to check a request does not grow with its number of layers.
    """
    if model is None:
        return in_order(allowed)
    distinct: dict[object, Recompute] = {}
    for policy in sorted(allowed, key=lambda p: p is not Recompute.FULL):
        every = policy.first_layers == model.num_layers
        counts = _count_recomputed(model, Recompute.FULL if every else policy)
        by_share = every or (not policy.is_numbered and any(counts))
        distinct.setdefault(counts if by_share else policy, policy)
    return in_order(distinct.values())


MAX_POLICIES = 32


class RecomputeOf(Frozen):
    """The recomputation policy of a candidate."""

    recompute: Recompute = Recompute.NONE


class RecomputeAsked(Frozen):
    """The field of a request about recomputation."""

    recompute: Annotated[tuple[Policy, ...], Field(min_length=1, max_length=MAX_POLICIES)] | None = Field(
        None,
        description="The policies to choose among. Null: all but `offload` and those with a number, `layers_N` and "
        "`groups_N`, which are explored only if they are named here; `offload` also if nothing else may fit.",
    )
    base_recompute: Policy | None = Field(
        None, description="The policy of the base (1.00x) if the model can run it; null: none.", exclude_if=is_null
    )


SHARES = frozenset({Recompute.PARTIAL_25, Recompute.PARTIAL_50, Recompute.PARTIAL_75})
FIRST_LAYERS, LAYER_GROUPS = "layers_N", "groups_N"
"""The policies with a number, for any number."""
DIFFERENT_LAYERS = "a share of layers that differ"
"""The first layers are measured. A trainer that recomputes every Nth does the same where all layers are of one kind."""


class AskedPolicy(NamedTuple):
    """A recomputation policy of a model whose layers may be of several kinds."""

    policy: Recompute
    layers_differ: bool = False


def _asks(asked: AskedPolicy) -> Iterable[Hashable]:
    if asked.policy.is_numbered:
        yield LAYER_GROUPS if asked.policy.first_layers is None else FIRST_LAYERS
    else:
        yield asked.policy
    if asked.layers_differ and asked.policy in SHARES:
        yield DIFFERENT_LAYERS


def _words(asked: AskedPolicy, lacking: Hashable) -> str:
    return f"the recomputation policy '{asked.policy}'{' of layers that differ' if lacking is DIFFERENT_LAYERS else ''}"


def layers_differ(shapes: ModelSpec | None, report: DeviceSupport | None) -> bool:
    """Return whether the layers are of more than one kind, so that it matters which of them are recomputed."""
    if shapes is not None:
        return 0 < shapes.count_layers(LayerKind.MOE) < shapes.num_layers
    return report is not None and report.parts is not None and len(set(report.parts.layers)) > 1


def _to(policy: Recompute) -> Change:
    return Change(f"recompute {policy}", {"recompute": (policy,)})


class RecomputePolicies(Dimension):
    """The policies that a request names, or those that a model and its execution can run."""

    def considered(self, place: Place) -> tuple[Recompute, ...]:
        """Return the policies to consider, without duplicates of what is recomputed; in eval mode only `none`."""
        named = place.asked.recompute
        allowed = self._all(place) if named is None else named
        if not place.is_training:
            return (Recompute.NONE,) if Recompute.NONE in allowed else ()
        return distinct_policies(place.shapes, allowed)

    def _all(self, place: Place) -> tuple[Recompute, ...]:
        always_compiles = EXECUTION.always_compiles(place)  # which takes longer than all else here
        return tuple(
            policy
            for policy in ON_DEVICE
            if not (always_compiles and policy.by_operation)
            and (policy is not Recompute.EXPERTS or place.may_have_experts)
        )

    def asked_of_trainer(self, candidate: Candidate, place: Place) -> AskedPolicy:
        """Return the policy, and whether it matters which layers it takes."""
        return AskedPolicy(candidate.recompute, layers_differ(place.shapes, place.report))

    def named_for_trainer(self, place: Place) -> Iterable[tuple[str, Any]]:
        """Yield the policies that are named."""
        return (("recompute", AskedPolicy(policy)) for policy in place.asked.recompute or ())

    def check(self, place: Place) -> None:
        """Check that the model, the mode and the execution have each policy that is named."""
        named = place.asked.recompute or ()
        for policy in named:
            self._check_policy(policy, place)
        if Recompute.OFFLOAD in named:
            _check_offload(place)
        for policy in named:
            if policy.is_numbered:
                self._check_number(policy, place)
        if not place.is_training and not self.considered(place):
            message = "recompute must allow 'none' in eval mode: nothing is recomputed without a backward pass"
            raise RuleError(message, "recompute", "mode")

    def _check_policy(self, policy: Recompute, place: Place) -> None:
        """Check that a model has experts to recompute, and that no compiler chooses in the policy's place."""
        if policy is Recompute.EXPERTS and not place.may_have_experts:
            raise RuleError("recompute 'experts' given for a model without experts", "recompute")
        if policy.by_operation and EXECUTION.always_compiles(place):
            raise RuleError(
                f"recompute '{policy}' needs execution 'eager' or 'graph': within a graph, the compiler chooses which "
                "operations to run again",
                "recompute",
                "execution",
            )

    def _check_number(self, policy: Recompute, place: Place) -> None:
        """Check that a policy names no more layers than there are, and that groups of layers have whole parameters."""
        if place.shapes is not None:
            try:
                refuse_number(policy, place.shapes.num_layers)
            except ValueError as error:
                raise RuleError(str(error), "recompute", "model.num_layers") from error
        if policy.group_size is None:
            return
        if place.target == TRANSFORMERS and EXECUTION.always_compiles(place):
            raise RuleError(f"recompute '{policy}' needs execution 'eager' in a transformers model", "recompute")
        level = SHARDING.highest(place)
        if level.level > Sharding.ZERO1.level:
            raise RuleError(
                f"recompute '{policy}' needs whole parameters and gradients on each device (sharding none or zero1): "
                f"with '{level}', layers that run again would gather them once more",
                "recompute",
                "training.sharding",
            )

    def unspent(self, place: Place) -> Point:
        """Return nothing to recompute."""
        return {"recompute": Recompute.NONE} if place.asked.recompute is None else {}

    def relaxations(self, place: ReportedPlace) -> Iterable[Change]:
        """Yield the policies that the request leaves out, up to `full`, and `offload`: no other policy keeps less."""
        named = self.considered(place)
        if place.is_training:
            others = () if Recompute.FULL in named else distinct_policies(place.shapes, self._all(place))
            yield from (_to(one) for one in (*others, Recompute.OFFLOAD) if one not in (Recompute.NONE, *named))

    def column(self, place: ReportedPlace) -> Column:
        """Return the policies that the model's code can run."""
        named, policies = place.asked.recompute, self.considered(place)
        for policy in policies:
            try:
                refuse_number(policy, place.model.num_layers)
            except ValueError as error:
                raise EmptySpaceError(str(error)) from error
        offered = [one for one in policies if offers_policy(place.model, one, named=named is not None)]
        if not offered and named is not None and isinstance(place.model, ModelParts):
            raise EmptySpaceError(_why_none(named, place.model))
        return column_of("recompute", offered)

    def bases(self, place: ReportedPlace) -> Column:
        """Return `base_recompute`, `none`, then selective and full, then `offload` if the request names it."""
        policies: tuple[Recompute, ...] = (Recompute.NONE,)
        if place.is_training:
            first = place.asked.base_recompute or Recompute.NONE
            asked = {Recompute.OFFLOAD}.intersection(self.considered(place))
            policies = (first, Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL, *asked)
        offered = [one for one in dict.fromkeys(policies) if offers_policy(place.model, one, named=True)]
        return column_of("recompute", offered)


def _check_offload(place: Place) -> None:
    """Check that `offload` has what it needs: layers of a transformers model on one GPU, in eager execution."""
    policy = f"recompute '{Recompute.OFFLOAD}'"
    refused = (
        (place.target != TRANSFORMERS, "target", f"target '{TRANSFORMERS}'"),
        (place.device_kind == "cpu", "device_kind", "a GPU: on a CPU, activations lie in the host's memory already"),
        (place.num_devices > 1, "num_devices", "num_devices 1: it is measured with the host's memory for itself"),
    )
    for wrong, other, needed in refused:
        if wrong:
            raise RuleError(f"{policy} needs {needed}", "recompute", other)
    if place.is_training and Execution.EAGER not in EXECUTION.considered(place):
        raise RuleError(f"{policy} needs execution 'eager'", "recompute", EXECUTION.field(place))


def _why_none(named: Collection[Recompute], model: ModelParts) -> str:
    """Return why the code of a model can run none of the policies that a request names."""
    whole = model.unavailable.get("checkpointing")
    reasons = dict.fromkeys(filter(None, (model.unavailable.get(policy) or whole for policy in named)))
    policies = ", ".join(f"'{policy}'" for policy in named)
    return f"recompute {policies}: {'; '.join(reasons) or f'none of them can be run {model.place}'}"


RECOMPUTE = RecomputePolicies(
    name="recompute",
    fields=("recompute",),
    asked="recompute",
    term=Term(_words, _asks, frozenset({Recompute.NONE, Recompute.FULL})),
    least=_to(Recompute.FULL),
    label=lambda candidate: None if candidate.is_whole else f"recompute={candidate.recompute}",
    row=lambda candidate: None if candidate.is_whole else ("recompute", str(candidate.recompute)),
)
