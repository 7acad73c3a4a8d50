"""The host's memory in a container: what its control groups allow, of version 2 and of version 1."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Host, host_memory
from asyncmem.devices.cgroup import Container

MIB = 1 << 20
MACHINE = host_memory.total_memory()
UNLIMITED = str((1 << 63) - 4096)


def fake_tree(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    files = {
        "proc/self/cgroup": "0::/pod/app",
        "sys/fs/cgroup/pod/memory.max": 64 * MIB,
        "sys/fs/cgroup/pod/memory.current": 50 * MIB,
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {10 * MIB}",
        "sys/fs/cgroup/pod/app/memory.max": "max",
        "sys/fs/cgroup/pod/app/memory.current": 40 * MIB,
    }
    return fake_tree(tmp_path, files)


def version_1(root: Path, limit: object, folder: str) -> Path:
    """Have a group of the first version, beside one of the second that has no memory."""
    path = f"sys/fs/cgroup/memory{folder}"
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/docker/1\n0::/",
        f"{path}/memory.limit_in_bytes": limit,
        f"{path}/memory.usage_in_bytes": 20 * MIB,
        f"{path}/memory.stat": f"inactive_file 5\ntotal_inactive_file {4 * MIB}",
    }
    return fake_tree(root, files)


def use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_container", Container(root))


def test_a_pool_takes_its_share_of_what_the_container_may_have(unified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a group around the process's own counts, for the default limit and for a percentage."""
    use(unified, monkeypatch)
    assert Host().capacity == 64 * MIB
    for asked, limit in (None, int(0.9 * 64 * MIB)), ("50%", 32 * MIB), ("1 TiB", 64 * MIB):
        with AsyncMemoryPool("host", limit=asked) as pool:
            assert limit <= pool.capacity() < limit + MIB


def test_what_is_free_is_what_the_container_has_left(unified: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files that nobody uses are free: the kernel takes them back first."""
    use(unified, monkeypatch)
    assert host_memory.host_memory().free == 24 * MIB


@pytest.mark.parametrize("folder", ["", "/docker/1"])
def test_version_1_is_read_too(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the container has mounted only its own group, and the host's path leads nowhere."""
    use(version_1(tmp_path, 32 * MIB, folder), monkeypatch)
    assert host_memory.total_memory() == 32 * MIB
    assert host_memory.host_memory().free == 16 * MIB


def test_the_machine_is_the_limit_where_no_group_has_a_lower_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of version 1 is a number, too; and a system may have no groups."""
    use(tmp_path / "none", monkeypatch)
    assert host_memory.total_memory() == MACHINE
    use(version_1(tmp_path, UNLIMITED, "/docker/1"), monkeypatch)
    assert host_memory.total_memory() == MACHINE
    assert 0 < host_memory.host_memory().free <= MACHINE
