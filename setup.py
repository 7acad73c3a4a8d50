"""Build the compiled core. Everything else about the package is in pyproject.toml."""

import os
import platform
from concurrent.futures import Future, ThreadPoolExecutor

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = "asyncmem/core"
SOURCES = ["accounts", "check", "heap", "log", "place", "plan", "report"]
SOURCES += ["resting", "segments", "spaces", "waste"]
SOURCES += [f"scheduler/{name}" for name in ["deadlock", "inspect", "limits", "pages", "provide"]]
SOURCES += [f"scheduler/{name}" for name in ["replay", "scheduler", "serve", "source", "upkeep"]]
PARTS = ["allocator", "batch", "buffer", "core", "doors", "heap", "heap_api", "lanes", "policy", "quick", "ready"]
PARTS += ["replay", "request", "retire", "scheduler", "scheduler_api", "spares", "witness"]
HEADERS = ["cache.hpp", "entries.hpp", "fences.hpp", "few.hpp", "handles.hpp", "heap.hpp", "holes.hpp"]
HEADERS += ["index.hpp", "journal.hpp", "ledger.hpp", "lock.hpp", "log.hpp", "node.hpp", "notes.hpp", "reserved.hpp"]
HEADERS += ["resting.hpp", "slots.hpp", "space.hpp", "written.hpp"]
HEADERS += [f"scheduler/{name}.hpp" for name in ["costs", "effects", "growth", "lag", "policy", "queue", "replay"]]
HEADERS += [f"scheduler/{name}.hpp" for name in ["request", "scheduler", "shares", "source", "timeline", "told"]]
HEADERS += ["doors.h", "ending.h", "fence_calls.h", "immediate.h", "recycle.h"]

# gcc clears objects of a hundred bytes by `rep stos`, whose start-up alone costs 5 ns.
GCC_ON_X86 = platform.machine() == "x86_64" and platform.system() == "Linux"
MEMSET = ["-mmemset-strategy=unrolled_loop:256:noalign,libcall:-1:noalign"] if GCC_ON_X86 else []

core = Extension(
    "asyncmem.core._core",
    [f"{CORE}/_core.pyx", *[f"{CORE}/{name}.cpp" for name in SOURCES]],
    language="c++",
    include_dirs=[CORE],
    depends=[*[f"{CORE}/binding/{name}.pxi" for name in PARTS], *[f"{CORE}/{name}" for name in HEADERS]],
    # Cython would mangle the names of functions that C code looks up by name.
    define_macros=[("CYTHON_EXTERN_C", 'extern "C"')],
    # Two counters updated as one vector right after one of them was stored alone stall the hit path for 8 ns.
    extra_compile_args=["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fno-tree-slp-vectorize", *MEMSET],
    extra_link_args=["-s"],
)
dlpack = Extension(
    "asyncmem.arrays._dlpack",
    ["asyncmem/arrays/_dlpack.pyx"],
    extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-s"],
)
buckets = Extension(
    "asyncmem.buckets._buckets",
    ["asyncmem/buckets/_buckets.pyx"],
    extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-s"],
)
GPU = "asyncmem/devices/gpu"
GPU_SOURCES = ["context", "cuda", "gathering", "hip", "mapping", "paging", "table", "watch"]
gpu = Extension(
    "asyncmem.devices.gpu._calls",
    [f"{GPU}/_calls.pyx", *[f"{GPU}/{name}.cpp" for name in GPU_SOURCES]],
    language="c++",
    include_dirs=[CORE, GPU],
    depends=[
        f"{CORE}/fence_calls.h",
        f"{CORE}/lock.hpp",
        *[
            f"{GPU}/{name}"
            for name in [
                "context.hpp",
                "finalizing.h",
                "mapping.hpp",
                "gathering.hpp",
                "paging.hpp",
                "paging.pxi",
                "table.hpp",
                "watch.hpp",
            ]
        ],
    ],
    extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-s", "-pthread"],
)

# The drivers are found at run time, so the module can be built anywhere where it could ever be.
modules = [core, dlpack, buckets, gpu] if platform.system() == "Linux" else [core, dlpack, buckets]


class BuildSideBySide(build_ext):
    """Compile the files of an extension side by side, one on each processor: one by one they take two minutes."""

    def build_extensions(self) -> None:
        """Put each file's compilation on a thread, and wait for all of an extension before it is linked."""
        compile_one, compile_all = self.compiler._compile, self.compiler.compile
        under_way: list[Future[None]] = []

        def compile_and_wait(*arguments: object, **named: object) -> object:
            objects = compile_all(*arguments, **named)
            while under_way:
                under_way.pop().result()
            return objects

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self.compiler._compile = lambda *arguments: under_way.append(threads.submit(compile_one, *arguments))
            self.compiler.compile = compile_and_wait
            super().build_extensions()


setup(ext_modules=cythonize(modules, language_level=3), cmdclass={"build_ext": BuildSideBySide})
