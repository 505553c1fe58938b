"""The space without what is predicted not to fit or not to pay."""

from __future__ import annotations

from bexp.explorer.cost.composition import Composition, predict_memory
from bexp.explorer.dimensions.micro_batch_size import MICRO_BATCH_SIZE
from bexp.explorer.dimensions.recompute import Recompute
from bexp.explorer.request.request import ExplorationRequest
from bexp.explorer.search.legal_space import PrunedSpace, prune_space
from tests.explorer.search.small import REPORT, candidate, small_request


def prune(req: ExplorationRequest, limit: int | None = None) -> PrunedSpace:
    """The pruned space on a device that a job may use `limit` bytes of."""
    changed = REPORT.hardware if limit is None else REPORT.hardware.model_copy(update={"memory_limit_bytes": limit})
    assert req.model is not None
    return prune_space(req.model, req, REPORT.model_copy(update={"hardware": changed}))


def need(req: ExplorationRequest, size: int, share: float = 0.7, **changes: str) -> float:
    """Bytes that a candidate is predicted to need with a share of its predicted activations."""
    assert req.model is not None
    table = Composition([candidate(size, **changes)], req.model, req)
    return float(predict_memory(table, REPORT.hardware, activation_share=share)[0])


def test_a_base_outside_the_space_has_a_row_but_may_not_be_recommended() -> None:
    found = prune(small_request(recompute=["full"]))
    plainest = found.bases[0]
    assert plainest == candidate(1)
    assert found.table is not None
    assert plainest in found.table.row
    assert plainest not in found.legal.candidates
    assert len(found.table.candidates) == len(found.legal.candidates) + 2


def test_a_named_tile_that_only_the_batch_has_leaves_nothing_to_compare_with() -> None:
    asked = {"micro_batch_size": None, "batch_size": 7, "recompute": ["none"]}
    tiled = small_request(**asked, bta={"enable": True, "tiles": [7]})
    undivided = MICRO_BATCH_SIZE.undivided(tiled.space.place)
    assert MICRO_BATCH_SIZE.undivided(small_request(**asked).space.place) == undivided != ()
    assert {(c.micro_batch_size, c.bta_tile) for c in prune(tiled).legal.candidates} == {(7, 7)}


def test_a_limit_that_equals_the_need_is_enough() -> None:
    req = small_request(attention_backends=["cudnn"], recompute=["none"], micro_batch_size=[4])
    exact = need(req, 4)
    hardware = REPORT.hardware.model_copy(update={"memory_limit_bytes": exact})
    assert req.model is not None
    found = prune_space(req.model, req, REPORT.model_copy(update={"hardware": hardware}))
    assert found.num_predicted_out == 0


def test_the_table_is_null_if_nothing_that_may_be_recommended_fits() -> None:
    found = prune(small_request(), limit=1)
    assert found.table is None
    assert (len(found.legal.candidates), found.num_predicted_out) == (0, 12)
    assert len(found.bases) == 3
    only_base = small_request(micro_batch_size=[4], recompute=["none"], base_micro_batch_size=1)
    between = round(need(only_base, 1)) + 2
    assert between < need(only_base, 4)
    assert prune(only_base, between).table is None


def dominating(limit_gib: float | None = None, **fields: object) -> PrunedSpace:
    """The space of a request that leaves tiles and recomputation to the search, of micro-batches 1, 2 and 4."""
    req = small_request(**{"bta": {}, "recompute": None, "attention_backends": ["cudnn"], **fields})
    return prune(req, None if limit_gib is None else round(limit_gib * 2**30))


def test_only_what_surely_fits_dominates() -> None:
    """With a limit between what a size needs as predicted and what it may need, nothing of that size is left out."""
    req = small_request(attention_backends=["cudnn"], recompute=["none"])
    for share, kept in ((1.2, True), (1.5, False)):
        space = dominating(need(req, 4, share) / 2**30)
        policies = {c.recompute for c in space.legal.candidates if c.micro_batch_size == 4}
        assert (Recompute.FULL in policies) is kept
        assert Recompute.FULL not in {c.recompute for c in space.legal.candidates if c.micro_batch_size == 1}


def test_a_rival_that_may_not_be_recommended_dominates_nothing() -> None:
    assert dominating(bta={"enable": True}, recompute=["none"]).num_dominated == 0
