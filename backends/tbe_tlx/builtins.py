"""Device operations that Triton's language lacks, for either provider of TLX; each has a compile test.

triton-utlx 3.8.0.post16 drops its own gpu fence silently and crashes in its own launch control, so neither is
used: the fence is a line of PTX, and launch control is built from the operations that its builder has from
Triton. Meta's fbtriton has no such builder, and its own launch control works.

Imports Triton. A provider must have been loaded (``providers.load``) before a kernel with launch control
compiles.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from triton.language import core

FINGERPRINT = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
"""Of this file. Triton keys a compiled kernel by its source without that of builtins: kernels refer to this."""

RESPONSE_BYTES = 16


@core.builtin
def gpu_fence(_semantic: Any = None) -> None:
    """Every thread: what it wrote before, and has seen of others, is ordered before what it does after, for
    threads of the whole GPU."""
    _ptx("fence.acq_rel.gpu;", _semantic)


@core.builtin
def store_reduce_add(desc: Any, offsets: Any, tile: Any, _semantic: Any = None) -> None:
    """Add ``tile`` to ``desc``'s block at ``offsets`` in global memory, by the tensor memory accelerator, and
    wait until the sum is there for this thread; the order among programs is not fixed.

    ``desc``: a tensor descriptor whose block has the tile's shape; rows of 16 bytes or more.
    """
    desc.atomic_add(offsets, tile, _semantic=_semantic)
    # Triton's own wait may end when shared memory has been read. The additions came through another proxy than
    # later loads and stores: the second fence orders the two.
    _ptx("cp.async.bulk.wait_group 0; fence.proxy.async.global;", _semantic)


def _ptx(code: str, semantic: Any) -> None:
    """Run ``code`` in every thread, where it stands."""
    core.inline_asm_elementwise(
        f"{code} mov.u32 $0, 0;", "=r", [], core.int32, is_pure=False, pack=1, _semantic=semantic
    )


# --- launch control: a running program takes the place of one that has not started (sm_100 and later) ---------


class QueueType(core.base_type):
    """The type of ``Queue``."""

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        out.extend(_shared_ints(builder, words) for words in (RESPONSE_BYTES // 8, 1))

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[Queue, int]:
        return Queue(handles[cursor], handles[cursor + 1]), cursor + 2

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def mangle(self) -> str:
        return "TBEQ"


class Queue(core.base_value):
    """A response's 16 bytes and the mbarrier that tells its arrival, both in shared memory."""

    def __init__(self, response: Any, barrier: Any) -> None:
        self.response, self.barrier, self.type = response, barrier, QueueType()

    def _flatten_ir(self, handles: list[Any]) -> None:
        handles.extend((self.response, self.barrier))

    def _set_name(self, builder: Any, name: str) -> None:
        """Nothing to name."""


class ResponseType(core.base_type):
    """The type of ``Response``."""

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        out.append(builder.get_int128_ty())

    def _unflatten_ir(self, handles: list[Any], cursor: int) -> tuple[Response, int]:
        return Response(handles[cursor]), cursor + 1

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def mangle(self) -> str:
        return "TBER"


class Response(core.base_value):
    """A response in a register of 128 bits."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.type = handle, ResponseType()

    def _flatten_ir(self, handles: list[Any]) -> None:
        handles.append(self.handle)

    def _set_name(self, builder: Any, name: str) -> None:
        """Nothing to name."""


def _shared_ints(builder: Any, words: int) -> Any:
    layout = builder.get_swizzled_shared_layout(1, 1, 1, [0], [])
    return builder.get_shared_mem_desc_ty(builder.get_int64_ty(), [words], layout, [words])


def _is_fork(semantic: Any) -> bool:
    """Whether this is fbtriton's builder. AttributeError where neither provider has been loaded."""
    builder = semantic.builder
    if hasattr(builder, "create_clc_try_cancel"):
        return False
    if hasattr(builder, "clc_issue"):
        return True
    raise AttributeError("launch control: no TLX provider is loaded in this process")


@core.builtin
def clc_open(_semantic: Any = None) -> Any:
    """The queue of a program; call once, at its start. Its barrier's first phase is 0."""
    builder = _semantic.builder
    if _is_fork(_semantic):
        from triton.language.extra import tlx

        barriers = tlx.alloc_barriers(core.constexpr(1), core.constexpr(1), _semantic=_semantic)
        responses = tlx._alloc_clc_responses(core.constexpr(1), _semantic=_semantic)
        first = core.constexpr(0)
        return core.tuple(
            [
                tlx.local_view(responses, first, _semantic=_semantic),
                tlx.local_view(barriers, first, _semantic=_semantic),
            ]
        )
    response = builder.create_local_alloc(_shared_ints(builder, RESPONSE_BYTES // 8))
    barrier = builder.create_local_alloc(_shared_ints(builder, 1))
    builder.create_mbarrier_init(barrier, 1)
    return Queue(response, barrier)


@core.builtin
def clc_request(queue: Any, _semantic: Any = None) -> None:
    """Ask for a program that has not started; ``clc_wait`` has the answer. One request at a time, and none after
    one that found nothing."""
    builder = _semantic.builder
    # No thread may still be reading the last answer when the next one is written.
    core.debug_barrier(_semantic=_semantic)
    if _is_fork(_semantic):
        from triton.language.extra import tlx

        tlx.barrier_expect_bytes(queue[1], core.constexpr(RESPONSE_BYTES), _semantic=_semantic)
        tlx.fence(core.constexpr("async_shared"), _semantic=_semantic)
        tlx._clc_issue(queue[0], queue[1], _semantic=_semantic)
        return
    builder.create_mbarrier_expect(queue.barrier, RESPONSE_BYTES, builder.get_int1(True))
    builder.create_clc_try_cancel(queue.response, queue.barrier)


@core.builtin
def clc_wait(queue: Any, phase: Any, _semantic: Any = None) -> Any:
    """Wait for the answer and return it. ``phase``: int32, 0 for the first request, then 1 and 0 in turn."""
    builder = _semantic.builder
    if _is_fork(_semantic):
        from triton.language.extra import tlx

        tlx.barrier_wait(queue[1], phase, _semantic=_semantic)
        return core.tuple(list(tlx._clc_query(queue[0], _semantic=_semantic)))
    builder.create_mbarrier_wait(queue.barrier, phase.handle, builder.get_int1(True), [])
    return Response(builder.create_clc_load_result(queue.response))


@core.builtin
def clc_found(response: Any, _semantic: Any = None) -> Any:
    """int1: whether the request took a program's place. If not, all have started, and this one must end."""
    if _is_fork(_semantic):
        return response[0].__ge__(0, _semantic=_semantic)
    return core.tensor(_semantic.builder.create_clc_is_canceled(response.handle), core.int1)


@core.builtin
def clc_place(response: Any, axis: Any, _semantic: Any = None) -> Any:
    """int32: the program id that was taken, along ``axis``. Undefined, and not to be asked, where none was."""
    axis = core._unwrap_if_constexpr(axis)
    if _is_fork(_semantic):
        return response[axis]
    return core.tensor(_semantic.builder.create_clc_get_program_id(response.handle, axis), core.int32)
