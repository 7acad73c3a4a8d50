"""A service that embeds texts, and answers in time what it admits when ten times too many requests come.

    pip install 'asyncmem[prometheus]' starlette 'uvicorn[standard]'
    OPENBLAS_NUM_THREADS=1 uvicorn app:app
    curl localhost:8000/embed -H 'X-Api-Key: gold' -H 'X-Request-Timeout: 0.5' -d 'a text'

A request leases the memory that its text needs, and then runs. So memory bounds how many run at a time, budgets and
priorities decide whose, and a request that would not be answered by its deadline is refused at once, with 429.
"""

import asyncio
import gc
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from model import LENGTHS, make_model
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import asyncmem
from asyncmem.insight import serve_live
from asyncmem.insight.prometheus import PoolCollector

DEVICE = os.environ.get("DEVICE", "host")  # "cuda:0" for torch on a GPU
LIMIT = os.environ.get("LIMIT", "128 MiB")  # what requests may use together
WORKERS = int(os.environ.get("WORKERS", os.cpu_count() or 1))  # threads for the model; a GPU needs two or three
DEFAULT_TIMEOUT, LONGEST_TIMEOUT = 1.0, 30.0  # seconds


@dataclass(eq=False)
class Tenant:
    """Whose requests share a budget."""

    name: str
    share: float  # of the limit
    priority: int  # among the tenants
    margin: float  # a request is refused unless so many times the seconds are left that it should take
    waiting: float = 0  # seconds of work that wait for memory
    budget: asyncmem.Budget = field(init=False)


class TooBusy(Exception):
    """The request would not be answered in time; `wait` is how long the work before it takes, in seconds."""

    def __init__(self, wait: float) -> None:
        super().__init__(wait)
        self.wait = wait


async def read(request: Request) -> bytes:
    """Return the text, or of one that is too long the beginning: more of it is not read."""
    text = bytearray()
    async for piece in request.stream():
        text += piece
        if len(text) > LENGTHS[-1]:
            break
    return bytes(text)


def yield_to_loop() -> None:
    """Have the event loop go before this thread of the model, so that requests are refused soon on a busy machine."""
    if sys.platform == "linux":  # elsewhere this is the priority of the process
        os.setpriority(os.PRIO_PROCESS, 0, 10)


class Server:
    """The service: a model, and a pool whose memory its requests lease."""

    def __init__(self) -> None:
        # By API key. Together they may have more than the limit: what one leaves, others use; then the priority counts.
        # The margins leave "gold" time when "free" has all that it is admitted for.
        self.tenants = {
            "gold": Tenant("gold", share=0.75, priority=1, margin=1.5),
            "free": Tenant("free", share=0.5, priority=0, margin=3),
        }
        self.model = make_model(DEVICE)
        self.threads = ThreadPoolExecutor(WORKERS, initializer=yield_to_loop)
        self.pool = asyncmem.AsyncMemoryPool(DEVICE, limit=LIMIT, name="server")
        self.ready = False
        self.need: dict[int, int] = {}  # bytes for a text of each length
        self.alone: dict[int, float] = {}  # seconds that it takes when nothing else runs
        self.work: dict[int, float] = {}  # and by which one more delays those behind it
        self.running = 0.0  # seconds of work that have their memory
        self.slowness = 1.0  # nine in ten requests take at most so many times what these figures say
        self.metrics = CollectorRegistry()
        self.metrics.register(PoolCollector())
        self.latency = Histogram(
            "request_seconds", "Until the answer, by how it ended.", ["tenant", "end"], registry=self.metrics
        )
        self.app: Starlette = Starlette(
            routes=[
                Route("/embed", self.embed, methods=["POST"]),
                Route("/live", self.tell_live),
                Route("/ready", self.tell_ready),
                Route("/metrics", self.tell_metrics),
            ],
            lifespan=self.lifespan,
        )

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Open the pool, learn what texts need, and serve. At the end uvicorn has let all requests finish."""
        async with self.pool:
            limit = self.pool.stats().limit or 0
            await self.measure(limit)
            gc.freeze()  # a collection takes 0.1 s, in which no request is refused, where it walks all that torch has
            for tenant in self.tenants.values():
                tenant.budget = self.pool.budget(tenant.name, limit=int(limit * tenant.share))
            watching = asyncio.create_task(self.watch_pressure())
            with self.threads, serve_live():  # for `asyncmem top`
                yield
            self.ready = False
            await self.pool.aclose()
            await watching

    async def measure(self, limit: int) -> None:
        """Run each length alone, and then as many at a time as there is memory for."""
        for length in LENGTHS:
            text = b" " * length
            async with self.pool.lease(limit) as lease:
                await self.in_thread(text, lease)  # the first time takes longer
                began = time.monotonic()
                await self.in_thread(text, lease)
                self.alone[length] = time.monotonic() - began
                self.need[length] = lease.stats().peak_allocated
            began, number = time.monotonic(), limit // self.need[length]
            await asyncio.gather(*(self.run_in_pool(text) for _ in range(number)))
            self.work[length] = (time.monotonic() - began) / number

    async def run_in_pool(self, text: bytes) -> None:
        """Run the model in a lease that is nobody's."""
        async with self.pool.lease(self.need[len(text)]) as lease:
            await self.in_thread(text, lease)

    async def watch_pressure(self) -> None:
        """Be not ready from 80 % of the memory on, until less than 60 % is in use."""
        self.ready = True
        async for level in self.pool.pressure_changes():
            self.ready = level < (asyncmem.Pressure.HIGH if self.ready else asyncmem.Pressure.MEDIUM)

    def admit(self, tenant: Tenant, nbytes: int, deadline: float) -> tuple[int, float]:
        """Return to what length a text is padded, and the seconds until its answer, or raise `TooBusy`."""
        length = next(length for length in LENGTHS if nbytes <= length)
        ahead = self.work_ahead(tenant)
        usual, left = ahead + self.alone[length], deadline - time.monotonic()
        # Where nothing runs, slowness does not count: it would never change if it had all requests refused.
        if left < (tenant.margin * self.slowness * usual if ahead else usual):
            raise TooBusy(ahead * self.slowness)
        return length, usual

    async def answer(self, tenant: Tenant, text: bytes, deadline: float) -> list[float]:
        """Return the vector of a text, or raise `TooBusy`."""
        length, usual = self.admit(tenant, len(text), deadline)
        began = time.monotonic()
        try:
            patience = max(deadline - began - self.slowness * self.alone[length], 0)
            vector = await self.run(tenant, text.ljust(length), patience)
        except asyncmem.PoolTimeout:  # others went first
            raise TooBusy((usual - self.alone[length]) * self.slowness) from None
        slowness = (time.monotonic() - began) / usual
        self.slowness = min(1.2 * self.slowness, slowness) if slowness > self.slowness else max(0.98 * self.slowness, 1)
        return vector

    def work_ahead(self, tenant: Tenant) -> float:
        """Return the seconds of work that come before a tenant's next request, to the microsecond."""
        ahead = (other for other in self.tenants.values() if other is tenant or other.priority >= tenant.priority)
        return round(self.running + sum(other.waiting for other in ahead), 6)

    async def run(self, tenant: Tenant, text: bytes, patience: float) -> list[float]:
        """Run the model in a lease of a tenant's budget."""
        lease = tenant.budget.lease(self.need[len(text)], priority=tenant.priority, timeout=patience)
        async with AsyncExitStack() as stack:
            tenant.waiting += self.work[len(text)]
            try:
                await stack.enter_async_context(lease)
            finally:
                tenant.waiting -= self.work[len(text)]
            return await self.in_thread(text, lease)

    async def in_thread(self, text: bytes, lease: asyncmem.Lease) -> list[float]:
        """Run the model, which blocks, in a thread."""
        work = self.work.get(len(text), 0)
        self.running += work
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, self.model.embed, text, lease)
        finally:
            self.running -= work

    async def embed(self, request: Request) -> Response:
        """Answer `POST /embed`."""
        began = time.monotonic()
        tenant = self.tenants.get(request.headers.get("x-api-key", ""))
        if tenant is None:
            return JSONResponse({"error": "unknown API key"}, 401)
        try:
            timeout = min(float(request.headers.get("x-request-timeout", DEFAULT_TIMEOUT)), LONGEST_TIMEOUT)
        except ValueError:
            timeout = math.nan
        if math.isnan(timeout):  # which float also reads
            return JSONResponse({"error": "X-Request-Timeout is not in seconds"}, 400)
        nbytes = int(request.headers.get("content-length", 0))
        if nbytes > LENGTHS[-1]:
            return JSONResponse({"error": f"more than {LENGTHS[-1]} bytes"}, 413)
        end = "failed"
        try:
            self.admit(tenant, nbytes, began + timeout)  # before its body is read, and again when that is there
            text = await read(request)
            if len(text) > LENGTHS[-1]:  # it came in pieces, without a length in its header
                return JSONResponse({"error": f"more than {LENGTHS[-1]} bytes"}, 413)
            vector = await self.answer(tenant, text, began + timeout)
            end = "answered" if time.monotonic() < began + timeout else "late"
            return JSONResponse({"vector": vector})
        except TooBusy as busy:
            end = "refused"
            return JSONResponse({"error": "too busy"}, 429, {"Retry-After": str(max(math.ceil(busy.wait), 1))})
        finally:
            self.latency.labels(tenant.name, end).observe(time.monotonic() - began)

    async def tell_live(self, _request: Request) -> Response:
        """Answer `GET /live`: the event loop runs."""
        return Response("live\n")

    async def tell_ready(self, _request: Request) -> Response:
        """Answer `GET /ready`, which a load balancer asks before it sends requests here."""
        return Response("ready\n") if self.ready else Response("busy\n", 503)

    async def tell_metrics(self, _request: Request) -> Response:
        """Answer `GET /metrics`, for Prometheus."""
        return Response(generate_latest(self.metrics), media_type="text/plain")


app = Server().app
