"""What Triton's versions call differently in Gluon, which is experimental. Imports Triton.

`thread_barrier` of Triton 3.6 is `barrier` from 3.7 on, and `_reinterpret` of 3.8 is `reinterpret` from 3.9 on.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

thread_barrier: Any = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Waits for all threads of the warpgroups that run the code."""
_MEMORY: Any = gl.shared_memory_descriptor
reinterpret: Any = _MEMORY._reinterpret if hasattr(_MEMORY, "_reinterpret") else _MEMORY.reinterpret
"""Shared memory as one of another type, shape and layout."""
