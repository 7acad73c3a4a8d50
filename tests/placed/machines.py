"""Processes of a Dask cluster, forked from one that has imported all they need; run as a program."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self


class Machine:
    """A process of a cluster.

    Attributes:
        pid: Its number.
        address: Where Dask finds it.
    """

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        self.address = address

    def signal(self, number: signal.Signals) -> None:
        """Kill it, or have it stand still or go on."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Machines:
    """Makes schedulers, workers and clients, and ends them all."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-W", "ignore", str(Path(__file__)), str(theirs.fileno())]
            environment = {**os.environ, "DASK_LOGGING__DISTRIBUTED": "critical"}
            self._program = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._socket = ours
        self.made: list[Machine] = []

    def scheduler(self, *, port: int = 0) -> Machine:
        """Start a scheduler."""
        return self._make("scheduler", str(port))

    def worker(self, scheduler: Machine, memory: int = 256 << 20) -> Machine:
        """Start a worker."""
        return self._make("worker", scheduler.address, str(memory))

    def client(self, scheduler: Machine, items: int) -> Machine:
        """Start a program that runs a pipeline."""
        return self._make("client", scheduler.address, str(items))

    def _make(self, *words: str) -> Machine:
        self._socket.send(" ".join(words).encode())
        pid, _, address = self._socket.recv(4096).decode().partition(" ")
        assert address, words
        self.made.append(Machine(int(pid), address))
        return self.made[-1]

    def clear(self) -> None:
        """End those that were made."""
        while self.made:
            self.made.pop().signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._socket.close()
        self._program.wait(30)


def wait_for_end(machine: Machine) -> None:
    """Wait until a process that was killed is gone."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(machine.pid)
        select.select([process], [], [], 30)
        os.close(process)


async def be_scheduler(ready: socket.socket, port: str) -> None:
    """Be a scheduler."""
    from distributed import Scheduler

    async with Scheduler(host="127.0.0.1", port=int(port), dashboard=False) as scheduler:
        ready.send(scheduler.address.encode())
        await scheduler.finished()


async def be_worker(ready: socket.socket, scheduler: str, memory: str) -> None:
    """Be a worker."""
    from distributed import Worker

    folder = f"/tmp/asyncmem-test-{os.getpid()}"  # noqa: S108  # Dask removes it
    async with Worker(
        scheduler, nthreads=1, memory_limit=int(memory), dashboard=False, host="127.0.0.1", local_directory=folder
    ) as worker:
        ready.send(worker.address.encode())
        await worker.finished()


async def be_client(ready: socket.socket, scheduler: str, items: str) -> None:
    """Run a pipeline, and be killed meanwhile."""
    from placed.stages import three

    async with three().place(scheduler, window="1 MiB") as pipe:
        ready.send(b"running")
        async for _ in pipe.map(range(int(items))):
            await asyncio.sleep(0.01)


def main() -> None:
    """Fork a process for each order that comes."""
    import distributed  # noqa: F401  # once for all

    import asyncmem.distributed.placed  # noqa: F401

    sys.path.append(str(Path(__file__).parents[1]))  # as pytest names the files; behind all that is installed
    import placed.stages  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with closing(socket.socket(fileno=int(sys.argv[1]))) as orders:
        while words := orders.recv(4096).decode().split():
            ours, theirs = socket.socketpair()
            child = os.fork()
            if not child:
                orders.close()
                ours.close()
                role: Any = {"scheduler": be_scheduler, "worker": be_worker, "client": be_client}[words[0]]
                with suppress(KeyboardInterrupt):
                    asyncio.run(role(theirs, *words[1:]))
                os._exit(0)
            theirs.close()
            with ours:
                ours.settimeout(30)
                orders.send(f"{child} {ours.recv(4096).decode()}".encode())


if __name__ == "__main__":
    started = time.monotonic()
    main()
