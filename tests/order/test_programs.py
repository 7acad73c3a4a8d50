"""Random programs on several streams: every order is kept, and every rule that is broken on purpose is caught."""

import gc
import sys
import threading
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmem.core import Retire
from asyncmem.devices import Simulated, StreamOrderError

from .heaps import HEAPS
from .mutants import BROKEN_HEAPS, MUTANTS, Mutant
from .native import BROKEN_TABLES, DEVICES, NativeSimulated
from .program import ALONE, ON_BLOCKS, FullHeap, Program

STEPS = 150

MakeHeap = type[FullHeap]
MakeDevice = type[Simulated]
Step = tuple[str, int, int, int]

steps = st.lists(
    st.tuples(
        st.sampled_from(["allocate"] * 6 + ["free"] * 4 + sorted(ON_BLOCKS) + sorted(ALONE)),
        st.integers(0, 63),
        st.integers(0, 2),
        st.integers(0, 23),
    ),
    max_size=80,
)


@pytest.fixture(params=HEAPS)
def heap(request: pytest.FixtureRequest) -> MakeHeap:
    made: MakeHeap = HEAPS[request.param]
    return made


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> MakeDevice:
    made: MakeDevice = DEVICES[request.param]
    return made


@pytest.mark.parametrize("fence_every", [1, 4])
@pytest.mark.parametrize("late_fences", [True, False])
def test_random_programs_touch_no_memory_out_of_order(
    heap: MakeHeap, device: MakeDevice, late_fences: bool, fence_every: int
) -> None:
    """Whatever is allocated, shared, handed over, freed, merged, trimmed or fails, no use is out of order."""
    taken = 0
    for seed in range(40):
        program = Program(heap(), device=device, late_fences=late_fences, fence_every=fence_every)
        program.run(seed, STEPS)
        taken += program.foreign_takes
        keeps_the_terms(program)
    assert taken > 60, "the programs hardly ever took memory of another stream"


def keeps_the_terms(program: Program) -> None:
    """Fences of a table are used until their release only, and none is left over."""
    device = program.device
    if isinstance(device, NativeSimulated):
        del program.retire
        assert device.problems == []
        assert device.fences == {}


@pytest.mark.parametrize("kind", HEAPS)
@pytest.mark.parametrize("calls", DEVICES)
@given(history=steps, fence_every=st.integers(1, 3))
@settings(max_examples=60)
def test_any_history_touches_no_memory_out_of_order(
    kind: str, calls: str, history: list[Step], fence_every: int
) -> None:
    """The same for histories that hypothesis makes up, and makes small when it finds one that fails."""
    program = Program(HEAPS[kind](), device=DEVICES[calls], fence_every=fence_every)
    for step in history:
        program.step(*step)
    program.finish()
    keeps_the_terms(program)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_broken_rule_is_caught(heap: MakeHeap, device: MakeDevice, rule: str) -> None:
    """Each rule is needed: without it some program uses memory out of order, and the checker says so."""
    assert any(_is_caught(heap, MUTANTS[rule], seed, device) for seed in range(100))


@pytest.mark.parametrize("fence_every", [1, 3])
@pytest.mark.parametrize("rule", BROKEN_TABLES)
def test_a_table_that_does_not_do_as_it_says_is_caught(heap: MakeHeap, rule: str, fence_every: int) -> None:
    """What the device's functions answer is what the order rests on: without any one of them it breaks."""
    mutant = Mutant(fence_every=fence_every)
    assert any(_is_caught(heap, mutant, seed, BROKEN_TABLES[rule]) for seed in range(100))


@pytest.mark.parametrize("rule", BROKEN_HEAPS)
def test_a_rule_broken_inside_the_heap_is_caught(rule: str) -> None:
    """The same for the rules that the heap keeps by itself, in the twin, where they can be broken one by one."""
    heap = cast("MakeHeap", BROKEN_HEAPS[rule])
    assert any(_is_caught(heap, Mutant(), seed) for seed in range(100))


def _is_caught(make: MakeHeap, mutant: Mutant, seed: int, device: MakeDevice = Simulated) -> bool:
    try:
        program = Program(mutant.heap(make)(), mutant.retire, device=device, fence_every=mutant.fence_every)
        program.run(seed, STEPS, without="fault")
    except StreamOrderError:
        return True
    return False


def test_a_heap_refuses_a_fence_for_an_open_epoch(heap: MakeHeap) -> None:
    """Frees that are still to come cannot be covered: the mistake is not even possible to make quietly."""
    core = heap()
    with pytest.raises(ValueError, match="open"):
        core.publish(0, core.open_epoch(0))


def test_programs_on_many_threads_touch_no_memory_out_of_order(device: MakeDevice) -> None:
    """Taking, freeing, fencing and polling from many threads at once keeps every order."""
    program = Program(HEAPS["compiled"](), device=device)
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        mine = _Share(program)
        try:
            # Between the look for an empty segment and its removal another thread may allocate: a pool locks that.
            mine.run(seed, 5 * STEPS, without="trim")
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below, whatever it is
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    program.finish()


class _Share(Program):
    """One thread's blocks in a program that several threads run."""

    def __init__(self, whole: Program) -> None:
        self.__dict__.update(whole.__dict__)
        self.blocks = []
        self.busy = None

    def finish(self) -> None:
        while self.blocks:
            self.free(self.blocks[0], 0, 0)


def test_blocks_freed_by_the_garbage_collector_at_any_time_keep_their_order(heap: MakeHeap, device: MakeDevice) -> None:
    """A finalizer may interrupt any call here and free a block with users: nothing hangs, nothing is out of order."""
    program = Program(heap(), device=device)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(150):
            program.allocate(number % 3, 0)
            if program.blocks:
                block = program.blocks.pop()
                program.use_on(block, (number + 1) % 3, 0)
                _Cycle(program.heap, program.retire, block.index, (number + 1) % 3)
            program.poll(0, number)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    program.finish()


class _Cycle:
    """Garbage in a cycle, freed only when the collector comes by."""

    def __init__(self, heap: FullHeap, retire: Retire, block: int, user: int) -> None:
        self._heap, self._retire, self._block, self._user = heap, retire, block, user
        self._self = self

    def __del__(self) -> None:
        self._heap.free(self._block, self._retire.entries_for([self._user]))
