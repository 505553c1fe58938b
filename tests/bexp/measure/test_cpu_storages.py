import torch
from torch.testing._internal.two_tensor import TwoTensor

from bexp.measure.memory_meters import LiveStorages

KIB = 1024


def kib(n: int) -> torch.Tensor:
    return torch.zeros(n * KIB, dtype=torch.uint8)


def test_what_existed_before_is_not_counted_even_when_written_to() -> None:
    before = kib(8)
    with LiveStorages([before]) as storages:
        before.add_(1)
        assert before.view(2, -1).sum() > 0
        assert storages.allocated_bytes == 0


def test_a_level_survives_leaving_the_mode() -> None:
    storages = LiveStorages()
    with storages:
        a = kib(4)
    del a
    assert storages.allocated_bytes == 0


def test_a_storage_counts_with_its_present_size() -> None:
    before = kib(8)
    resize = torch.UntypedStorage.resize_
    with LiveStorages([before]) as storages:
        a = kib(4)
        a.untyped_storage().resize_(0)
        assert storages.allocated_bytes == 0
        a.untyped_storage().resize_(6 * KIB)
        before.untyped_storage().resize_(16 * KIB)
        assert (storages.allocated_bytes, storages.peak_bytes) == (6 * KIB, 6 * KIB)
        del a
        assert storages.allocated_bytes == 0
    assert torch.UntypedStorage.resize_ is resize


def test_a_tensor_that_wraps_others_counts_as_what_it_wraps() -> None:
    with LiveStorages() as storages:
        wrapper = TwoTensor(kib(2), kib(2))
        assert storages.allocated_bytes == 4 * KIB
        twice = wrapper * 2
        assert storages.allocated_bytes == 8 * KIB
        del wrapper, twice
        assert storages.allocated_bytes == 0
