from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks.isolation import Isolated, Lost, Spoilt


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _spoilt() -> Spoilt:
    return Spoilt(os.getpid())


def test_a_process_is_kept_until_a_call_takes_it_down() -> None:
    with Isolated() as isolated:
        first = isolated.call(os.getpid, seconds=300)
        assert first not in {os.getpid(), None}
        assert isolated.call(os.getpid, seconds=300) == first

        crashed = isolated.call(_crash, seconds=300)
        assert isinstance(crashed, Lost)
        assert not crashed.timed_out
        assert str(-signal.SIGSEGV) in crashed.reason

        hung = isolated.call(time.sleep, 60, seconds=0.5)
        assert isinstance(hung, Lost)
        assert hung.timed_out

        second = isolated.call(_spoilt, seconds=300)
        assert isolated.call(os.getpid, seconds=300) not in {first, second}
        assert isolated.restarts == 3
        with pytest.raises(ValueError, match="invalid literal"):
            isolated.call(int, "x", seconds=300)
