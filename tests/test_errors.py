"""Errors carry facts, make their own sentence, and survive a copy to another process."""

import copy
import copyreg
import pickle

import pytest

import asyncmem
from asyncmem import errors
from asyncmem.errors import (
    AsyncmemError,
    AsyncmemWarning,
    BackendUnavailable,
    BadTrace,
    BufferReleased,
    DeadlockError,
    Described,
    DeviceError,
    InvalidRequest,
    LeakWarning,
    NoDeviceHasRoom,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RankLost,
    ReaderLost,
    RequestCancelled,
    StageError,
    StageLost,
    StaleDescriptor,
    StallWarning,
    StepError,
    TooManyRequests,
    UnknownOption,
)
from asyncmem.facts import OutOfMemoryFacts, OwnerInfo, Shortfall

MIB = 1 << 20

FACTS = OutOfMemoryFacts(
    asked=64 * MIB,
    device="cuda:0",
    limit=2048 * MIB,
    reserved=2048 * MIB,
    live=1984 * MIB,
    free=64 * MIB,
    largest_hole=48 * MIB,
    pending_fence_bytes=16 * MIB,
    device_free=512 * MIB,
    waiting=3,
    waiting_bytes=96 * MIB,
    holders=(("weights", 1536 * MIB), ("kv", 448 * MIB)),
    remedies={"merge": 1, "trim": 3},
    advice=("raise limit", "free 'kv'"),
)

OWNERS = (
    OwnerInfo(owner="loader", held=48 * MIB, waiting=32 * MIB, age=1.25),
    OwnerInfo(owner="stage 2", held=16 * MIB, waiting=64 * MIB, age=0.5),
)

ALL = [
    InvalidRequest("size", -1, "0 to 128 TiB", hint="sizes are bytes"),
    OutOfMemoryError(FACTS),
    PoolTimeout(pool="decode", asked=64 * MIB, timeout=2.0, ahead=3, free=12 * MIB),
    RequestCancelled(pool="decode", asked=64 * MIB),
    PoolClosed("decode", "its worker died: OSError"),
    TooManyRequests(pool="decode", waiting=8, max_waiting=8, asked=MIB),
    DeadlockError(pool="decode", owners=OWNERS, hints=("ask for all at once with allocate_batch",)),
    DeviceError("cuMemMap", code=2, code_name="CUDA_ERROR_OUT_OF_MEMORY", device="cuda:0", advice="trim first"),
    BackendUnavailable("cuda:0", tried=("libcuda.so.1: not found",), install='use "host" or "simulated"'),
    BufferReleased(64 * MIB, tag="activations", action="view()"),
    BadTrace("a second free of allocation 5", "one", file="train.npz", row=17, hint="cut off?"),
    StageError("decode", 17, "ValueError: no such file"),
    StepError("block 2", 5, forward=False, reason="ValueError: no"),
    NoDeviceHasRoom(
        48 * MIB,
        [Shortfall(device="cuda:0", room=32 * MIB, lacking=16 * MIB), Shortfall(device="cuda", reason="no GPU")],
    ),
    UnknownOption("options", "limits", "the name of an option", hint="did you mean 'limit'?"),
    StaleDescriptor("its process has ended"),
    ReaderLost(4711, 64 * MIB),
    StageLost("decode", 17, "there is no worker"),
    RankLost(1, "has ended"),
]


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (InvalidRequest, ValueError),
        (UnknownOption, InvalidRequest),
        (UnknownOption, TypeError),
        (BadTrace, InvalidRequest),
        (OutOfMemoryError, MemoryError),
        (OutOfMemoryError, RuntimeError),
        (PoolTimeout, TimeoutError),
        (NoDeviceHasRoom, MemoryError),
        (StageLost, StageError),
        (LeakWarning, AsyncmemWarning),
        (StallWarning, AsyncmemWarning),
        (AsyncmemWarning, RuntimeWarning),
    ],
)
def test_errors_are_also_the_builtin_kind(kind: type[Exception], builtin: type[Exception]) -> None:
    """Code that catches Python's own kinds catches ours."""
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("error", ALL, ids=lambda one: type(one).__name__)
def test_errors_belong_to_one_tree_of_the_top_package(error: AsyncmemError) -> None:
    """One base catches all, and tracebacks name them by the shortest name that programs can import."""
    assert isinstance(error, AsyncmemError)
    module = "asyncmem" if type(error).__name__ in asyncmem.__all__ else "asyncmem.errors"
    assert type(error).__module__ == module


def test_every_error_of_the_tree_is_tried_here() -> None:
    """No error is added without its facts being tested."""
    named = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, AsyncmemError)}
    assert named == {AsyncmemError, *map(type, ALL)}


@pytest.mark.parametrize("error", ALL, ids=lambda one: type(one).__name__)
def test_copies_keep_sentence_and_facts(error: AsyncmemError, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that comes back from another process is the same error."""
    monkeypatch.setattr(f"asyncmem.{type(error).__name__}", type(error), raising=False)
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_out_of_memory_on_cuda_starts_as_callers_expect() -> None:
    """Code written for other allocators looks for this text in a RuntimeError."""
    assert str(OutOfMemoryError(FACTS)).startswith("CUDA OOM: CUDA out of memory. On cuda:0: ")
    host = OutOfMemoryFacts(asked=MIB, device="host")
    assert str(OutOfMemoryError(host)).startswith("out of memory on host: asked for 1 MiB; no limit")


def test_out_of_memory_says_all_its_facts_with_units() -> None:
    """Who reads the message needs no debugger: amounts, holes, fences, waiters, holders, what was and can be tried."""
    assert str(OutOfMemoryError(FACTS)).partition("cuda:0: ")[2] == (
        "asked for 64 MiB; limit 2 GiB, reserved 2 GiB, live 1.94 GiB; "
        "free 64 MiB (largest hole 48 MiB, 16 MiB behind fences); device has 512 MiB free; "
        "3 requests waiting for 96 MiB; held by 'weights' 1.50 GiB, 'kv' 448 MiB; "
        "tried merge 1 time, trim 3 times. Try: raise limit; free 'kv'"
    )


def test_out_of_memory_has_its_facts_as_attributes() -> None:
    """What the sentence says can be read without parsing it."""
    error = OutOfMemoryError(FACTS)
    assert error.facts is FACTS
    assert (error.asked, error.free, error.largest_hole, error.limit) == (64 * MIB, 64 * MIB, 48 * MIB, 2048 * MIB)
    assert (error.waiting, error.pending_fence_bytes, error.holders) == (3, 16 * MIB, FACTS.holders)


def test_deadlock_shows_the_table_of_owners() -> None:
    """Every stuck owner has a line with what it holds, what it waits for and how long."""
    lines = str(ALL[6]).splitlines()
    assert lines[0] == "deadlock in pool 'decode': 2 owners cannot all be served even if all others free everything"
    assert [line.split() for line in lines[1:4]] == [
        ["owner", "holds", "waits", "for", "since"],
        ["loader", "48", "MiB", "32", "MiB", "1.25", "s"],
        ["stage", "2", "16", "MiB", "64", "MiB", "500", "ms"],
    ]
    assert lines[4] == "To avoid it: ask for all at once with allocate_batch"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ALL[0], "size: expected 0 to 128 TiB, got -1 (sizes are bytes)"),
        (ALL[2], "pool 'decode' had no 64 MiB within 2 s: 3 requests ahead, 12 MiB free"),
        (ALL[3], "the request for 64 MiB from pool 'decode' was cancelled"),
        (ALL[4], "pool 'decode' is closed: its worker died: OSError"),
        (PoolClosed("decode"), "pool 'decode' is closed and cannot be opened again"),
        (
            ALL[5],
            "pool 'decode' has 8 waiting requests and max_waiting is 8; the request for 1 MiB was not queued",
        ),
        (ALL[7], "cuMemMap failed on cuda:0: CUDA_ERROR_OUT_OF_MEMORY (2). trim first"),
        (ALL[8], 'device \'cuda:0\' is not available (tried libcuda.so.1: not found). use "host" or "simulated"'),
        (ALL[9], "this buffer of 64 MiB tagged 'activations' has been freed; view() needs a live one"),
        (BufferReleased(0), "this buffer of 0 B has been freed"),
        (ALL[10], "trace 'train.npz', row 17: expected one, got a second free of allocation 5 (cut off?)"),
        (ALL[11], "stage 'decode' failed at item 17: ValueError: no such file"),
        (BadTrace("no rows", "some"), "trace: expected some, got no rows"),
        (
            ALL[13],
            "no device has room for 48 MiB: cuda:0 has room for 32 MiB and lacks 16 MiB; cuda cannot be used: no GPU",
        ),
        (ALL[15], "the descriptor opens no memory: its process has ended"),
        (ALL[16], "process 4711 ended before it let go of 64 MiB of shared memory"),
        (ALL[17], "stage 'decode' was lost at item 17: there is no worker"),
        (ALL[12], "stage 'block 2' failed in the backward of micro-batch 5: ValueError: no"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, AsyncmemError) else "text",
)
def test_sentences(error: AsyncmemError, text: str) -> None:
    """Each error says what happened, with numbers and units, and what to do where something can be done."""
    assert str(error) == text


def test_invalid_request_shows_what_came_without_keeping_it() -> None:
    """The message is bounded for any value, and the error keeps no buffer or array alive."""
    assert InvalidRequest("size", 10**6000, "less").got == "an integer of 19932 bits"
    assert len(InvalidRequest("name", "x" * 9000, "less").got) < 60
    assert InvalidRequest("buffer", Described("a buffer of pool 'a'"), "one of pool 'b'").got == "a buffer of pool 'a'"


def test_a_copy_keeps_nothing_of_where_the_error_came_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where distributed is imported, whose tblib has copies of errors keep frames, and what they came from."""
    support = pytest.importorskip("tblib.pickling_support")
    monkeypatch.setitem(copyreg.dispatch_table, InvalidRequest, support.pickle_exception)

    def fail() -> None:
        try:
            int("none")
        except ValueError as error:
            raise InvalidRequest("size", 0, "more") from error

    with pytest.raises(InvalidRequest) as raised:
        fail()
    twin = copy.copy(raised.value)
    assert (str(twin), vars(twin)) == (str(raised.value), vars(raised.value))
    assert twin.__traceback__ is twin.__cause__ is twin.__context__ is None
