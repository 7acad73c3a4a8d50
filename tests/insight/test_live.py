"""A process shows its pools to its own user, and nobody who asks can hold it up."""

import asyncio
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, tag
from asyncmem.insight import LiveServer, MemoryTracker, serve_live
from asyncmem.insight.live import client, server
from asyncmem.insight.live.client import NotServing, ask, serving

ME = os.getpid()
ELSE = 1 << 30
"""A number that no process has."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets lie; its name is short, as a socket's has to be."""
    with tempfile.TemporaryDirectory(prefix="am") as found:
        monkeypatch.setenv("XDG_RUNTIME_DIR", found)
        monkeypatch.setenv("TMPDIR", found)
        monkeypatch.setattr(tempfile, "tempdir", found)
        yield Path(found) / "asyncmem"


@pytest.fixture
def live(folder: Path) -> Iterator[LiveServer]:
    """This process serves."""
    with serve_live() as found:
        assert found.path.parent == folder
        yield found


def fake(folder: Path, answer: Callable[[socket.socket], None]) -> socket.socket:
    """Have somebody else answer the next who asks, under a number of its own."""
    folder.mkdir(mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / f"{ELSE}.sock"))
    listener.listen()

    def work() -> None:
        connection, _ = listener.accept()
        with connection:
            answer(connection)

    threading.Thread(target=work, daemon=True).start()
    return listener


# -- what is said --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("live")
def test_it_says_what_the_pool_says() -> None:
    """Figures of each pool and budget, who waits, and what holds most while that is recorded."""

    async def work() -> dict[str, Any]:
        async with (
            AsyncMemoryPool("simulated", limit="8 MiB", name="mine") as pool,
            AsyncMemoryPool("simulated", name="another"),
        ):
            part = pool.budget("part", limit="2 MiB")
            with MemoryTracker(pool):
                with tag("attention"):
                    held = await pool.allocate_async("6 MiB")
                waiting = asyncio.create_task(take(pool), name="patient")
                await asyncio.sleep(0)  # it asks, and waits
                found = await asyncio.to_thread(ask, ME)
                (mine,) = (one for one in found["pools"] if one["stats"]["name"] == "mine")
                figures = pool.stats().as_dict()
                assert mine["stats"].keys() == figures.keys()
                same = ("name", "device", "limit", "pressure", "active_bytes", "num_allocations", "waiting_bytes")
                assert all(mine["stats"][name] == figures[name] for name in same)
                held.free()
                await waiting
            part.close()
        return {**found, "mine": mine}

    found = asyncio.run(work())
    assert (found["process"], found["program"]) == (ME, sys.argv)
    names = [one["stats"]["name"] for one in found["pools"]]
    assert names == sorted(names)
    assert {"mine", "another"} <= set(names)
    mine = found["mine"]
    assert not mine["closed"]
    assert [one["name"] for one in mine["budgets"]] == ["part"]
    (waiter,) = mine["waiters"]
    assert (waiter["owner"], waiter["nbytes"], waiter["tag"]) == ("task patient", 4 << 20, "late")
    assert waiter["share"] == "mine"
    assert waiter["age"] > 0
    assert mine["tags"] == [{"name": "attention", "nbytes": 6 << 20}]
    (line,) = mine["sites"]
    assert line["name"].startswith(f"{__file__}:")


async def take(pool: AsyncMemoryPool) -> None:
    (await pool.allocate_async("4 MiB", tag="late")).free()


@pytest.mark.usefixtures("live")
def test_of_many_buffers_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """To go through them would hold the pool up."""
    monkeypatch.setattr(server, "_MANY", 1)
    with AsyncMemoryPool("simulated", name="mine") as pool, MemoryTracker(pool):
        held = [pool.allocate(1000)]
        assert [len(one["sites"]) for one in ask(ME)["pools"] if one["stats"]["name"] == "mine"] == [1]
        held.append(pool.allocate(1000))
        assert [len(one["sites"]) for one in ask(ME)["pools"] if one["stats"]["name"] == "mine"] == [0]
        held.clear()


@pytest.mark.usefixtures("live")
def test_a_closed_pool_is_there_while_its_buffers_are() -> None:
    """And says that it is closed."""
    pool = AsyncMemoryPool("simulated", name="mine")
    held = pool.allocate(1000)
    with pytest.warns(match="held"):
        pool.close()
    assert [one["closed"] for one in ask(ME)["pools"] if one["stats"]["name"] == "mine"] == [True]
    held.free()
    pool.close()


# -- to whom -------------------------------------------------------------------------------------------------------


def test_only_the_user_can_open_the_socket(live: LiveServer, folder: Path) -> None:
    """Neither the folder nor the socket is anybody else's to enter."""
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(live.path.stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [f"{ME}.sock"]


@pytest.mark.usefixtures("live")
def test_another_user_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets to the socket all the same; and the answer of another user is not read."""
    monkeypatch.setattr(server, "is_same_user", lambda _: False)
    with pytest.raises(NotServing):
        ask(ME)
    monkeypatch.undo()


@pytest.mark.usefixtures("live")
def test_another_users_answer_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers is whoever has bound the socket."""
    one, other = socket.socketpair()
    with one, other:
        assert client.peer_user(one) == os.geteuid()
        monkeypatch.setattr(client, "peer_user", lambda _: os.geteuid() + 1)
        assert not client.is_same_user(one)
        with pytest.raises(PermissionError, match="another user"):
            ask(ME)


@pytest.mark.parametrize("wrong", ["open", "link", "file"])
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The next one is; without any there is an error that names them all, and nobody looks into such."""
    if wrong == "open":
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
    elif wrong == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to("elsewhere")
    else:
        folder.touch(mode=0o700)
    with serve_live() as found:
        assert found.path.parent == folder.with_name(f"asyncmem-{os.geteuid()}")
        assert ask(ME)["process"] == ME
        monkeypatch.setattr(client, "folders", lambda: [folder])
        with pytest.raises(NotServing):
            ask(ME)
    with pytest.raises(OSError, match=str(folder)):
        serve_live()


def test_another_users_folder_is_not_entered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it lies where one's own would, and is closed to others."""
    folder.mkdir(mode=0o700)
    assert client.is_ours(folder)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert not client.is_ours(folder)


def test_a_path_that_no_socket_can_have_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next folder is."""
    long = folder / ("long" * 30)
    long.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with serve_live() as found:
        assert found.path.parent == folder.with_name(f"asyncmem-{os.geteuid()}")


# -- beginnings and ends -------------------------------------------------------------------------------------------


def test_serving_twice_is_serving_once(folder: Path) -> None:
    """The same server; once it is closed the socket is gone, and a new one may follow."""
    first = serve_live()
    assert serve_live() is first
    assert "serving" in repr(first)
    first.close()
    first.close()
    assert "closed" in repr(first)
    assert not list(folder.iterdir())
    assert serving() == []
    with serve_live() as second:
        assert second is not first
        assert [one["process"] for one in serving()] == [ME]


def test_sockets_that_were_left_over_are_removed(folder: Path) -> None:
    """By who serves next, and by who asks."""
    folder.mkdir(mode=0o700)
    left = folder / f"{ELSE}.sock"
    for removing in (lambda: serve_live().close(), serving):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(left))
        removing()
        assert not left.exists()
    with pytest.raises(NotServing):
        ask(ELSE)


FORKING = """
import os, signal, sys
from asyncmem.insight import serve_live
server = serve_live()
alive, ended = os.pipe()
if os.fork() == 0:
    os.close(ended)
    assert not server.alive
    server.close()
    assert server.path.exists()
    print(server.path, flush=True)
    os.read(alive, 1)  # until the parent is gone
    with serve_live() as mine:
        assert mine is not server and mine.path != server.path
        sys.stdin.read()
    print("served")
else:
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("folder")
def test_a_fork_does_not_answer_for_its_parent() -> None:
    """Nor does it end the parent's server; when the parent is killed, nobody listens."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        path = Path(process.stdout.readline().strip())
        assert ask(process.pid)["process"] == process.pid
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.wait(60) == -signal.SIGKILL
        with pytest.raises(NotServing):
            ask(process.pid)
        assert not path.exists()
        process.stdin.close()
        assert process.stdout.read() == "served\n"


def test_a_process_that_ends_removes_its_socket(folder: Path) -> None:
    """Without being told."""
    code = "from asyncmem.insight import serve_live; print(serve_live().path.exists())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "True\n"
    assert not list(folder.iterdir())


# -- whoever means ill ---------------------------------------------------------------------------------------------


def test_clients_that_do_not_read_hold_up_nobody_for_long(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is left after its time, and the next is answered; those that ask and go away cost nothing."""
    monkeypatch.setattr(server, "_TIMEOUT", 0.05)
    large = server.look() | {"program": ["x" * (4 << 20)]}
    monkeypatch.setattr(server, "look", lambda: large)
    idle = [client.connect(live.path, 60) for _ in range(5)]
    for _ in range(5):
        client.connect(live.path, 60).close()
    for one in idle:
        left = select.poll()
        left.register(one, select.POLLHUP)
        assert left.poll(60_000), "the server has hung up"
        one.close()
    monkeypatch.setattr(server, "_TIMEOUT", 60)
    assert len(ask(ME, 60)["program"][0]) == 4 << 20


@pytest.mark.usefixtures("live")
def test_a_look_that_fails_ends_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks is told, and who asks next is answered."""
    said = server.look()

    def fail() -> client.ProcessLook:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(server, "look", fail)
    with pytest.raises(OSError, match="on purpose"):
        ask(ME)
    monkeypatch.setattr(server, "look", lambda: said)
    assert ask(ME) == said


def flood(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(b" " * (1 << 20))
    except OSError:
        pass


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (flood, "without end"),
        (lambda one: one.sendall(b"no JSON"), "something else"),
        (lambda one: one.sendall(b"[" * 1_000_000), "something else"),
        (lambda one: one.sendall(json.dumps({"format": 99}).encode()), "another version"),
        (lambda one: one.recv(1), "timed out"),
    ],
)
def test_an_answer_that_is_none_is_an_error(folder: Path, answer: Callable[[socket.socket], None], says: str) -> None:
    """It neither fills the memory nor takes for ever."""
    with fake(folder, answer), pytest.raises(OSError, match=says):
        ask(ELSE, 0.2 if says == "timed out" else 60)


@pytest.mark.usefixtures("live")
def test_who_does_not_answer_is_left_out(folder: Path) -> None:
    """All others are listed."""
    with fake(folder, lambda one: one.sendall(b"no JSON")):
        assert [one["process"] for one in serving()] == [ME]
