"""`python -m benchmarks.serving`: the server of `examples/server` under ten times the load that it can serve.

Beside it stand the same server with a semaphore, and without admission. Each is a process of its own, whose memory is
read from outside. The load is h2load's (Debian's package nghttp2-client), or httpx's where that is not installed.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio.to_thread
import click
import httpx
import uvicorn

from asyncmem.cli.tables import output, show, table_of
from asyncmem.figures import format_duration, format_size

_ROOT: Final = Path(__file__).parents[1]
_KINDS: Final = {"pool": "leases", "semaphore": "semaphore", "none": "none"}
_DEADLINE: Final = 1.0  # seconds
_SHORT, _LONG = 200, 900  # bytes of a text
_BATCHES: Final = 50  # in which h2load's clients begin, in the first second: at most so many


@dataclass(frozen=True)
class Stream:
    """Requests of one kind."""

    tenant: str
    length: int
    share: float
    """Of what the server can serve; 0 for as fast as eight clients get their answers."""


STREAMS: Final = (Stream("gold", _SHORT, 0.2), Stream("free", _SHORT, 8.8), Stream("free", _LONG, 1.0))
Answers = dict[Stream, list[tuple[int, float]]]
"""Of the requests of each stream: status, and seconds until the answer."""


@dataclass
class Measured:
    """What was seen of a server."""

    answers: Answers
    before: int
    """Resident bytes before the load."""
    most: int
    """The most resident bytes."""
    recovered: float
    """Seconds after the load until a request is answered as fast as without it."""


def serve(kind: str, listening: int) -> None:
    """Run a server of that kind on a socket that listens, until it is stopped."""
    sys.path.append(str(_ROOT / "examples" / "server"))
    from app import Server, Tenant
    from model import LENGTHS

    class NoAdmission(Server):
        """Runs forty at a time, as there are threads, in all the memory that there is."""

        async def measure(self, limit: int) -> None:
            await super().measure(limit)
            self.pool.resize(limit="90%")

        def admit(self, tenant: Tenant, nbytes: int, deadline: float) -> tuple[int, float]:  # noqa: ARG002
            return LENGTHS[-1], 0.0

        async def answer(self, tenant: Tenant, text: bytes, deadline: float) -> list[float]:  # noqa: ARG002
            return await anyio.to_thread.run_sync(self.compute, text)

        def compute(self, text: bytes) -> list[float]:
            length = next(length for length in LENGTHS if len(text) <= length)
            with self.pool.lease(self.need[length]) as lease:
                return self.model.embed(text.ljust(length), lease)

    class Semaphore(NoAdmission):
        """Runs as many at a time as there is memory for if all texts are long."""

        async def measure(self, limit: int) -> None:
            await super().measure(limit)
            self.semaphore = asyncio.Semaphore(limit // self.need[LENGTHS[-1]])

        async def answer(self, tenant: Tenant, text: bytes, deadline: float) -> list[float]:
            async with self.semaphore:
                return await super().answer(tenant, text, deadline)

    server = {"pool": Server, "semaphore": Semaphore, "none": NoAdmission}[kind]()
    config = uvicorn.Config(server.app, access_log=False, log_level="warning")
    uvicorn.Server(config).run([socket.socket(fileno=listening)])


@contextmanager
def running(kind: str) -> Iterator[tuple[int, str]]:
    """Run a server of that kind until the block ends; return its process and its address."""
    paths = os.pathsep.join(path for path in [*sys.path, str(_ROOT)] if path)
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        file = listening.fileno()
        command = [sys.executable, "-m", "benchmarks.serving", "--serve", kind, "--listening", str(file)]
        # In a session of its own, as Linux gives sessions equal shares of the processor by default, like containers.
        started = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=[file])  # noqa: S603  # our own
    with started as process:
        try:
            if wait_for(url, 60) >= 60:
                raise TimeoutError("the server did not become ready within a minute")
            yield process.pid, url
        finally:
            process.terminate()


def wait_for(url: str, patience: float) -> float:
    """Wait until a server is ready, and answers in half of its deadline; return the seconds that this took."""
    began = time.monotonic()
    with httpx.Client(base_url=url) as client:
        while time.monotonic() < began + patience:
            try:
                if client.get("/ready").is_success:
                    answer = client.post("/embed", content=b" " * _SHORT, headers=_headers(STREAMS[0]))
                    if answer.is_success and answer.elapsed.total_seconds() < _DEADLINE / 2:
                        return time.monotonic() - began
            except httpx.TransportError:
                pass  # it does not listen yet, or is too busy
            time.sleep(0.01)
    return patience


def _headers(stream: Stream) -> dict[str, str]:
    return {"X-Api-Key": stream.tenant, "X-Request-Timeout": str(_DEADLINE if stream.share else 30)}


@contextmanager
def watched(process: int) -> Iterator[list[int]]:
    """Read the resident bytes of a process a hundred times a second; return those at first, and the most."""
    ended, status = threading.Event(), Path(f"/proc/{process}/statm")

    def resident() -> int:
        return int(status.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    found = [resident()] * 2

    def watch() -> None:
        while not ended.wait(0.01):
            found[1] = max(found[1], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def offer(url: str, streams: Sequence[Stream], capacity: float, seconds: float) -> Answers:
    """Send the requests of streams at shares of a capacity, which is in requests per second."""
    if shutil.which("h2load"):
        return _offer_by_h2load(url, streams, capacity, seconds)
    return asyncio.run(_offer_by_httpx(url, streams, capacity, seconds))


def _offer_by_h2load(url: str, streams: Sequence[Stream], capacity: float, seconds: float) -> Answers:
    with tempfile.TemporaryDirectory() as folder:
        logs = {stream: Path(folder, f"{number}.tsv") for number, stream in enumerate(streams)}
        with ExitStack() as all_ended:
            for stream, log in logs.items():
                text = log.with_suffix(".txt")
                text.write_bytes(b" " * stream.length)
                pace, rate = ["-c8", f"-n{10**9}"], stream.share * capacity
                if rate:  # clients that begin one batch after the other, and send about a request a second each
                    batches = min(max(round(rate), 1), _BATCHES)
                    batch = max(round(rate / batches), 1)
                    clients, each = batch * batches, rate / (batch * batches)
                    pace = [f"-c{clients}", f"-r{batch}", f"--rate-period={1000 // batches}ms"]
                    pace += [f"--rps={each}", f"-n{clients * max(round(seconds * each), 1)}"]
                headers = [f"-H{name}: {value}" for name, value in _headers(stream).items()]
                command = ["h2load", "--h1", *pace, *headers, f"-d{text}", f"--log-file={log}", f"{url}/embed"]
                process = all_ended.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))  # noqa: S603
                all_ended.callback(process.terminate)
            time.sleep(seconds + (_DEADLINE if capacity else 0))
        rows = {stream: log.read_text(encoding="ascii").splitlines() for stream, log in logs.items()}
    return {
        stream: [(int(status), int(taken) / 1e6) for _, status, taken, *_ in (line.split("\t") for line in lines)]
        for stream, lines in rows.items()
    }


async def _offer_by_httpx(url: str, streams: Sequence[Stream], capacity: float, seconds: float) -> Answers:
    answers: Answers = {stream: [] for stream in streams}
    began = time.monotonic()

    async def send(client: httpx.AsyncClient, stream: Stream) -> None:
        sent = time.monotonic()
        answer = await client.post("/embed", content=b" " * stream.length, headers=_headers(stream))
        answers[stream].append((answer.status_code, time.monotonic() - sent))

    async def repeat(client: httpx.AsyncClient, stream: Stream) -> None:
        while time.monotonic() < began + seconds:
            await send(client, stream)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client, asyncio.TaskGroup() as tasks:

        async def keep_pace(stream: Stream) -> None:
            for number in range(round(seconds * stream.share * capacity)):
                await asyncio.sleep(began + number / (stream.share * capacity) - time.monotonic())
                tasks.create_task(send(client, stream))

        for stream in streams:
            for _ in range(1 if stream.share else 8):
                tasks.create_task(keep_pace(stream) if stream.share else repeat(client, stream))
    return answers


def find_capacity(url: str, seconds: float) -> float:
    """Return how many requests of the mix a server answers in a second."""
    total, busy = sum(stream.share for stream in STREAMS), 0.0
    for stream in STREAMS:
        (answers,) = offer(url, [Stream("gold", stream.length, 0)], 0, seconds).values()
        busy += stream.share / total * seconds / max(sum(status == 200 for status, _ in answers), 1)
    return 1 / busy


def measure(process: int, url: str, capacity: float, seconds: float) -> Measured:
    """Send a server ten times what can be served."""
    with watched(process) as memory:
        answers = offer(url, STREAMS, capacity, seconds)
    return Measured(answers, memory[0], memory[1], wait_for(url, 60))


def _at(share: float, taken: list[float]) -> str:
    return format_duration(sorted(taken)[min(int(share * len(taken)), len(taken) - 1)]) if taken else "-"


_HEADINGS: Final = (
    "admission", "requests", "sent", "in time", "late", "99 % of these in", "refused", "50 % in", "99 % in", "failed",
    "memory", "at most", "recovered",
)  # fmt: skip


def _rows(kind: str, found: Measured) -> Iterator[list[str]]:
    for stream, answers in found.answers.items():
        answered = [taken for status, taken in answers if status == 200]
        refused = [taken for status, taken in answers if status == 429]
        in_time = sum(taken <= _DEADLINE for taken in answered)
        counts = len(answers), in_time, len(answered) - in_time
        failed = len(answers) - len(answered) - len(refused)
        yield [
            _KINDS[kind], f"{stream.tenant}, {stream.length} B", *map(str, counts), _at(0.99, answered),
            str(len(refused)), _at(0.5, refused), _at(0.99, refused), str(failed), format_size(found.before),
            format_size(found.most), format_duration(found.recovered),
        ]  # fmt: skip


@click.command()
@click.option("--seconds", default=120.0, show_default=True, help="Of load, for each server.")
@click.option("--only", type=click.Choice(list(_KINDS)), multiple=True, help="Servers; all of them if not given.")
@click.option("--serve", "served", type=click.Choice(list(_KINDS)), hidden=True)
@click.option("--listening", type=int, hidden=True)
def main(seconds: float, only: tuple[str, ...], served: str | None, listening: int) -> None:
    """Measure how many requests are answered by their deadline, how soon others are refused, and in what memory."""
    if served:
        serve(served, listening)
        return
    with running("pool") as (_, url):
        capacity = find_capacity(url, min(seconds, 5.0))
    click.echo(f"{capacity:.0f} requests per second can be served; ten times as many are sent for {seconds:.0f} s")
    rows: list[list[str]] = []
    for kind in only or _KINDS:
        with running(kind) as (process, url):
            rows += _rows(kind, measure(process, url, capacity, seconds))
    show(table_of(_HEADINGS, rows, left=("admission", "requests")), output())


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.serving")
