"""Build the compiled core. Everything else about the package is in pyproject.toml."""

import gzip
import os
import platform
import sys
import sysconfig
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "asyncmem does not run on free-threaded Python: its core asks reference counts whether a buffer is still held, "
        "which only the interpreter's lock makes true. Use the regular build of the same version."
    )

CORE, GPU = Path("asyncmem/core"), Path("asyncmem/devices/gpu")

# gcc clears objects of a hundred bytes by `rep stos`, whose start-up alone costs 5 ns.
GCC_ON_X86 = platform.machine() == "x86_64" and platform.system() == "Linux"
MEMSET = ["-mmemset-strategy=unrolled_loop:256:noalign,libcall:-1:noalign"] if GCC_ON_X86 else []


def files(folder: Path, *endings: str) -> list[str]:
    """Name the files of a folder that end so, without those that Cython makes."""
    found = (file for file in folder.rglob("*") if file.suffix in endings)
    return sorted(str(file) for file in found if not file.with_suffix(".pyx").exists())


core = Extension(
    "asyncmem.core._core",
    [str(CORE / "_core.pyx"), str(CORE / "whole.cpp")],
    language="c++",
    include_dirs=[str(CORE)],
    depends=files(CORE, ".cpp", ".pxi", ".hpp", ".h"),
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
gpu = Extension(
    "asyncmem.devices.gpu._calls",
    [str(GPU / "_calls.pyx"), *files(GPU, ".cpp")],
    language="c++",
    include_dirs=[str(CORE), str(GPU)],
    depends=[*files(GPU, ".pxi", ".hpp", ".h"), *files(CORE, ".h"), f"{CORE}/heap/lock.hpp"],
    extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
    extra_link_args=["-s", "-pthread"],
)

# The drivers are found at run time, so the module can be built anywhere where it could ever be.
modules = [core, dlpack, buckets, gpu] if platform.system() == "Linux" else [core, dlpack, buckets]


NEEDED = (
    "building asyncmem from source needs a C++20 compiler (g++ 10, clang 12 or later) and the headers of Python "
    "(on Debian: apt-get install g++ python3-dev)"
)
PROBE = "#include <Python.h>\n#include <concepts>\nstatic_assert(std::integral<int>);\n"


class BuildSideBySide(build_ext):
    """Compile the files of an extension side by side, one on each processor: one by one they take two minutes."""

    def build_extensions(self) -> None:
        """Have Cython make its files, put each file's compilation on a thread, and wait for all before linking.

        Raises:
            CompileError: The compiler cannot do it.
        """
        self._try_compiler()
        from Cython.Build import cythonize

        for module, made in zip(self.extensions, cythonize(self.extensions, language_level=3), strict=True):
            module.sources = made.sources
        compile_one, compile_all = self.compiler._compile, self.compiler.compile
        extension = threading.local()  # with `-j`, each has a thread

        def compile_and_wait(*arguments: object, **named: object) -> object:
            extension.under_way = []
            objects = compile_all(*arguments, **named)
            for one in extension.under_way:
                one.result()
            return objects

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            self.compiler._compile = lambda *given: extension.under_way.append(threads.submit(compile_one, *given))
            self.compiler.compile = compile_and_wait
            super().build_extensions()

    def _try_compiler(self) -> None:
        """Compile three lines, so that what is missing is said in one, and not after minutes."""
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder, "probe.cpp")
            probe.write_text(PROBE, encoding="utf-8")
            try:
                self.compiler.compile([str(probe)], output_dir=folder, extra_preargs=["-std=c++20"])
            except CompileError:
                raise CompileError(NEEDED) from None


class SameSdist(sdist):
    """Make the same bytes of the same files: their order, owners and times are not those of whoever makes them."""

    def make_archive(self, base_name: str, *_: object, base_dir: str, **_others: object) -> str:
        """Write the archive; times are `SOURCE_DATE_EPOCH`, or 1980 where that is not set."""
        moment = int(os.environ.get("SOURCE_DATE_EPOCH", "315532800"))

        def same(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = moment, 0, 0, "", ""
            entry.mode = 0o755 if entry.mode & 0o100 else 0o644
            return entry

        made = Path(f"{base_name}.tar.gz")
        made.parent.mkdir(exist_ok=True)
        with (
            made.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=moment) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=same)
        return str(made)


def use_what_is_made(module: Extension) -> None:
    """Take what Cython made of a module before, while no source of ours is newer.

    Cython itself would make it again in each isolated build, whose own files are new, and all would be compiled again.
    """
    source = Path(module.sources[0])
    made = source.with_suffix(".cpp" if module.language == "c++" else ".c")
    ours = [source, *(Path(file) for file in module.depends)]
    if made.exists() and all(file.stat().st_mtime < made.stat().st_mtime for file in ours):
        module.sources[0] = str(made)


for module in modules:
    use_what_is_made(module)
setup(ext_modules=modules, cmdclass={"build_ext": BuildSideBySide, "sdist": SameSdist})
