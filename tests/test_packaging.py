"""The package: what is tested is what is installed, and what is installed is complete and not more."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zlib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest

import asyncmem

SOURCE = Path(__file__).parents[1]
NOT_OURS = (".git", ".tox", ".venv", ".dev", ".*_cache", ".hypothesis", "_build", "build", "dist", "*.egg-info", "*.so")


@pytest.fixture(scope="module")
def installed() -> Distribution:
    try:
        found = distribution("asyncmem")
    except PackageNotFoundError:
        pytest.skip("asyncmem runs from its source tree here and is not installed")
    if not any(str(one).endswith("asyncmem/__init__.py") for one in found.files or []):
        pytest.skip("asyncmem is installed in place here")
    return found


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="outside tox the source tree may be what is imported")
def test_the_installed_build_is_tested() -> None:
    """Under tox nothing is imported from the source tree."""
    assert SOURCE / "asyncmem" not in Path(asyncmem.__file__).parents


def test_the_version_is_said_once(installed: Distribution) -> None:
    """The package and its metadata agree."""
    assert installed.version == asyncmem.__version__


def test_types_and_compiled_modules_are_installed(installed: Distribution) -> None:
    """Type checkers find the marker and a stub for each compiled module."""
    files = {str(one) for one in installed.files or []}
    compiled = {re.sub(r"\.[^/]*$", "", one) for one in files if one.endswith((".so", ".pyd"))}
    assert "asyncmem/core/_core" in compiled
    assert {"asyncmem/py.typed", *(f"{one}.pyi" for one in compiled)} <= files


def test_sources_of_the_core_and_tests_are_not_installed(installed: Distribution) -> None:
    """What only builders and developers need stays in the source distribution."""
    left = (".pyx", ".pxi", ".cpp", ".hpp", ".h", ".c", ".md", "tests", "setup.py")
    inside = [str(one) for one in installed.files or [] if one.parts[0] == "asyncmem"]
    assert inside
    assert not [one for one in inside if one.endswith(left)]
    assert not [one for one in installed.files or [] if one.parts[0] in {"benchmarks", "examples", "tests"}]


def test_the_metadata_says_what_users_need(installed: Distribution) -> None:
    """Licence, Python versions, the command, and dependencies that fit the machine."""
    metadata = installed.metadata
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert "asyncmem" in {one.name for one in installed.entry_points if one.group == "console_scripts"}
    assert [one.value for one in installed.entry_points if one.group == "pytest11"] == ["pytest_asyncmem"]
    needed = {re.split(r"[^\w-]", one)[0] for one in installed.requires or [] if "extra ==" not in one}
    assert needed == {"anyio", "numpy", "uvloop"}
    extras = {"cli", "cuda", "dask", "insight", "metal", "opencl", "pocl", "prometheus", "rocm"}
    assert set(metadata.get_all("Provides-Extra") or []) == extras


def test_a_wheel_is_at_most_3_mb(installed: Distribution) -> None:
    """All that is installed, compressed as a wheel has it."""
    files = [Path(str(one.locate())) for one in installed.files or [] if one.suffix != ".pyc"]
    assert sum(len(zlib.compress(file.read_bytes())) for file in files) <= 3_000_000


def test_a_build_without_a_compiler_says_in_a_line_what_is_needed(tmp_path: Path) -> None:
    """And does so at once, before Cython makes anything."""
    command = [sys.executable, str(SOURCE / "setup.py"), "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    missing = {**os.environ, "CC": "no-compiler", "CXX": "no-compiler", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=SOURCE, env=missing, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: building asyncmem from source needs a C++20 compiler (g++ 10, clang 12 or later) and the headers of "
        "Python (on Debian: apt-get install g++ python3-dev)"
    )


@pytest.mark.parametrize(
    "program",
    [
        "import runpy, sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; runpy.run_path('setup.py')",
        "import sys; sys.abiflags = 't'; import asyncmem",
    ],
    ids=["build", "import"],
)
def test_free_threaded_python_is_refused_with_the_reason(program: str) -> None:
    """Before anything is built or used."""
    done = subprocess.run([sys.executable, "-c", program], cwd=SOURCE, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        "asyncmem does not run on free-threaded Python: its core asks reference counts" in done.stderr.splitlines()[-1]
    )


def test_a_source_distribution_is_the_same_each_time(tmp_path: Path) -> None:
    """Whoever makes it, and when; it has what is needed to build, test and read the project."""
    made = []
    for name in ("here", "there"):
        shutil.copytree(SOURCE, tmp_path / name, ignore=shutil.ignore_patterns(*NOT_OURS))
        command = [sys.executable, "setup.py", "-q", "sdist"]
        source_only = {**os.environ, "SOURCE_DATE_EPOCH": "1800000000", "PYTHONSAFEPATH": "1"}
        subprocess.run(command, cwd=tmp_path / name, env=source_only, capture_output=True, check=True)
        made += (tmp_path / name / "dist").glob("*.tar.gz")
        (tmp_path / name / "README.md").touch()
    assert made[0].read_bytes() == made[1].read_bytes()
    with tarfile.open(made[0]) as archive:
        names = {one.partition("/")[2] for one in archive.getnames()}
    assert {"setup.py", "asyncmem/core/_core.pyx", "tests/conftest.py", "docs/index.md", "CHANGELOG.md"} <= names
    assert not [one for one in names if one.endswith((".so", ".pyc", "_core.cpp"))]


def test_a_release_needs_the_tag_of_its_version_and_a_section_of_the_changelog(tmp_path: Path) -> None:
    """A tag of another version, or a version that nobody described, ends the release."""
    for name in (".github/check_release.py", "asyncmem/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(SOURCE / name, tmp_path / name)

    def check(tag: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / ".github" / "check_release.py"), tag]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    tag, changelog = f"v{asyncmem.__version__}", tmp_path / "CHANGELOG.md"
    changelog.write_text(f"## [{asyncmem.__version__}] - 2027-01-01\n\nIt waits.\n\n## [0.0.1] - 2026-01-01\n\nOld.\n")
    assert check(tag).stdout == "It waits.\n"
    assert "the tag is v9.9" in check("v9.9").stderr
    changelog.write_text("## [Unreleased]\n\nIt waits.\n")
    assert "has no section" in check(tag).stderr


def test_the_workflow_of_releases_pins_all_that_it_runs() -> None:
    """An action is named by its commit: a tag may be moved."""
    workflow = (SOURCE / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    actions = re.findall(r"uses: (\S+)", workflow)
    assert len(actions) >= 8
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", one) for one in actions)


def test_commands_come_with_all_that_they_need() -> None:
    """`asyncmem run` and the reports on what it recorded work with the extra `cli` alone."""
    extras = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras["insight"]) <= set(extras["cli"])


def test_continuous_integration_runs_the_commands_of_the_readme() -> None:
    """What the README promises is what is tried, word for word."""
    commands = re.findall(
        r"^\.venv/bin/pip .*|^python3 -m venv .*", (SOURCE / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    script = (SOURCE / ".ci" / "run").read_text(encoding="utf-8")
    assert len(commands) == 2
    assert all(f'step "{one}"' in script for one in commands)
