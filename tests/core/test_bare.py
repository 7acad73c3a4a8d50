"""Objects that nobody made: compiled types refuse to be made by hand, and what is half-made ends no process."""

import subprocess
import sys

PROGRAM = """if True:
    import copy, importlib, inspect, pickle, pkgutil, warnings
    import asyncmem
    from importlib.util import find_spec
    from asyncmem.core import Heap

    warnings.simplefilter("ignore")
    MADE = {"Heap", "Users", "Notes", "Loan", "Library", "Sink", "BucketPool"}  # without arguments, and whole
    HEAP_TYPE = 1 << 9

    def compiled(kind):
        return any(one.__module__.startswith("asyncmem") and not one.__flags__ & HEAP_TYPE for one in kind.__mro__)

    def touch(thing):
        for look in (repr, hash, bool, len, iter, copy.copy, copy.deepcopy, lambda one: pickle.dumps(one, 0)):
            try:
                look(thing)
            except Exception:
                pass
        for name in dir(thing):
            try:
                member = getattr(thing, name)
                if inspect.isbuiltin(member) and not name.startswith("__"):
                    member()
            except Exception:
                pass

    # The modules under `interop` each need a library that is not there, and so may `distributed`.
    left_out = ("__main__", "interop.") if find_spec("distributed") else ("__main__", "interop.", "distributed")
    names = [one.name for one in pkgutil.walk_packages(asyncmem.__path__, "asyncmem.")
             if not any(part in one.name for part in left_out)]
    kinds = {}
    for name in names:
        for one in vars(importlib.import_module(name)).values():
            if isinstance(one, type) and one.__module__.startswith("asyncmem") and compiled(one):
                kinds[one] = None
    for kind in kinds:
        own = not kind.__flags__ & HEAP_TYPE
        for how, make in {"T()": kind, "T.__new__(T)": lambda: kind.__new__(kind),
                          "object.__new__(T)": lambda: object.__new__(kind)}.items():
            print(f"{kind.__module__}.{kind.__name__}: {how}", flush=True)
            try:
                thing = make()
            except TypeError:
                continue
            if own and kind.__name__ not in MADE:
                print("was made")
                raise SystemExit(1)
            touch(thing)
    for kind in kinds:  # methods with a self that is none
        for name in dir(kind):
            method = inspect.getattr_static(kind, name)
            if type(method).__name__ == "method_descriptor" and method.__objclass__ in kinds:
                print(f"{kind.__name__}.{name}(object())", flush=True)
                try:
                    method(object())
                except TypeError:
                    continue
                raise SystemExit(1)
    assert len(kinds) > 30, len(kinds)
"""

LIVE = """if True:
    import copy, pickle, warnings
    import asyncmem
    from asyncmem import Batch, Buffer
    from asyncmem.pool import Pin, Request

    warnings.simplefilter("ignore")
    with asyncmem.AsyncMemoryPool("host", limit="8 MiB") as pool:
        buffer, batch = pool.allocate(4096), pool.allocate_batch([1, 2]).result()
        waiting = pool.allocate_async("8 MiB")
        over = waiting.__await__()
        over.close()
        over.wake()  # a sleeper that is gone
        things = [
            pool, buffer, batch, iter(batch), buffer.pin(), buffer._pin(), pool.allocate_async(5), waiting, over,
            waiting.__await__(), pool.budget("b", limit=4096), pool.lease(4096), pool._opened.core,
            pool._opened.core.scheduler, pool._opened.retire, asyncmem.BucketPool(), pool.spillable(pool.allocate(5)),
        ]
        for thing in things:
            print(type(thing).__name__, flush=True)
            for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
                try:
                    pickle.loads(pickle.dumps(thing, protocol))
                except TypeError:
                    continue
                raise SystemExit("pickled")
            for clone in (copy.copy, copy.deepcopy):
                try:
                    clone(thing)
                except TypeError:
                    continue
                raise SystemExit("copied")
            if not isinstance(thing, asyncmem.MemoryShare | Pin | asyncmem.Spillable):
                try:
                    type(thing).__init__(thing)  # a second time
                except TypeError:
                    pass
            for name in dir(thing):
                if not name.startswith("__") and isinstance(thing, Buffer | Batch | Request):
                    try:
                        delattr(thing, name)
                    except (AttributeError, TypeError, NotImplementedError):
                        pass
            repr(thing)
"""


def run(program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    last = ended.stdout.strip().rpartition("\n")[2]
    assert ended.returncode == 0, f"{last}: {ended.returncode} {ended.stderr[-500:]}"


def test_no_compiled_type_can_be_made_by_hand() -> None:
    """Types that calls make raise TypeError, by whatever way; those that anybody may make are whole at once."""
    run(PROGRAM)


def test_live_handles_cannot_be_copied_or_made_again() -> None:
    """Each of these would give its memory back twice."""
    run(LIVE)
