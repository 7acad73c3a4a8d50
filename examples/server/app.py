"""A service that embeds texts, and does what it promised when ten times too many requests come.

    pip install 'asyncmem[prometheus]' starlette 'uvicorn[standard]'
    OPENBLAS_NUM_THREADS=1 uvicorn app:app
    curl localhost:8000/embed -H 'X-Api-Key: gold' -H 'X-Request-Timeout: 0.5' -d 'a text'

A request leases the memory that its text needs, and then runs. So memory bounds how many run at a time, budgets and
priorities decide whose, and a request that would not be answered by its deadline is refused at once, with 429.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
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
MARGIN = 2  # a request gets so many times the seconds that it is expected to take, or is refused


@dataclass(eq=False)
class Tenant:
    """Whose requests share a budget."""

    name: str
    share: float  # of the limit
    priority: int  # among the tenants
    limit: int = 0  # in bytes
    budget: asyncmem.Budget = field(init=False)


class TooBusy(Exception):
    """The request would not be answered in time; `wait` is how long there is no memory for it, in seconds."""

    def __init__(self, wait: float) -> None:
        super().__init__(wait)
        self.wait = wait


class Server:
    """The service: a model, and a pool whose memory its requests lease."""

    def __init__(self) -> None:
        # By API key. Together they may have more than the limit: what one leaves, others use; then the priority counts.
        self.tenants = {"gold": Tenant("gold", share=0.75, priority=1), "free": Tenant("free", share=0.5, priority=0)}
        self.model = make_model(DEVICE)
        self.threads = ThreadPoolExecutor(WORKERS)
        self.pool = asyncmem.AsyncMemoryPool(DEVICE, limit=LIMIT, name="server")
        self.ready = False
        self.need: dict[int, int] = {}  # bytes for a text of each length
        self.best: dict[int, float] = {}  # and seconds, when nothing else runs
        self.seconds: dict[int, float] = {}  # and on average
        self.held_for = 0.0  # seconds that memory is held for, on average
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
            self.limit = self.pool.stats().limit or 0
            await self.measure()
            for tenant in self.tenants.values():
                tenant.limit = int(self.limit * tenant.share)
                tenant.budget = self.pool.budget(tenant.name, limit=tenant.limit)
            watching = asyncio.create_task(self.watch_pressure())
            with self.threads, serve_live():  # for `asyncmem top`
                yield
            self.ready = False
            await self.pool.aclose()
            await watching

    async def measure(self) -> None:
        """Run each length alone, and then as many at a time as there is memory for."""
        for length in LENGTHS:
            text = b" " * length
            async with self.pool.lease(self.limit) as lease:
                await self.in_thread(text, lease)  # the first time takes longer
                began = time.monotonic()
                await self.in_thread(text, lease)
                self.best[length] = self.seconds[length] = time.monotonic() - began
                self.need[length] = lease.stats().peak_allocated
            await asyncio.gather(*(self.run(text, self.pool) for _ in range(self.limit // self.need[length])))

    async def watch_pressure(self) -> None:
        """Be not ready from 80 % of the memory on, until less than 60 % is in use."""
        self.ready = True
        async for level in self.pool.pressure_changes():
            self.ready = level < (asyncmem.Pressure.HIGH if self.ready else asyncmem.Pressure.MEDIUM)

    async def answer(self, tenant: Tenant, text: bytes, deadline: float) -> list[float]:
        """Return the vector of a text, or raise `TooBusy`."""
        length = next(length for length in LENGTHS if len(text) <= length)
        left, wait = deadline - time.monotonic(), self.expected_wait(tenant, self.need[length])
        # Where there is memory the average does not count: it would never change if it had all requests refused.
        if left < (MARGIN * (wait + self.seconds[length]) if wait else self.best[length]):
            raise TooBusy(wait)
        try:
            patience = max(left - self.seconds[length], 0)
            return await self.run(text.ljust(length), tenant.budget, tenant.priority, patience)
        except asyncmem.PoolTimeout:  # others went first
            raise TooBusy(wait) from None

    async def run(
        self, text: bytes, share: asyncmem.MemoryShare, priority: int = 0, timeout: float | None = None
    ) -> list[float]:
        """Run the model in a lease, and learn how long that takes."""
        nbytes = self.need[len(text)]
        async with share.lease(nbytes, priority=priority, timeout=timeout) as lease:
            began = time.monotonic()
            vector = await self.in_thread(text, lease)
            seconds = time.monotonic() - began
        self.seconds[len(text)] += 0.1 * (seconds - self.seconds[len(text)])
        self.held_for += nbytes / self.limit * (seconds - self.held_for)
        return vector

    async def in_thread(self, text: bytes, lease: asyncmem.Lease) -> list[float]:
        """Run the model, which blocks, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, self.model.embed, text, lease)

    def expected_wait(self, tenant: Tenant, nbytes: int) -> float:
        """Return the seconds until a tenant gets so much memory: what must be freed before, at the usual pace."""
        mine = tenant.budget.stats()
        ahead, live = mine.waiting_bytes + mine.allocated_bytes + nbytes, 0
        in_budget = ahead / tenant.limit
        for other in self.tenants.values():
            if other is not tenant:
                stats = other.budget.stats()
                live += stats.allocated_bytes
                if other.priority >= tenant.priority:  # what its budget has no room for is in nobody's way
                    ahead += min(stats.waiting_bytes, other.limit - stats.allocated_bytes)
        return max(in_budget - 1, (ahead + live) / self.limit - 1, 0) * self.held_for

    async def embed(self, request: Request) -> Response:
        """Answer `POST /embed`."""
        began = time.monotonic()
        tenant = self.tenants.get(request.headers.get("x-api-key", ""))
        if tenant is None:
            return JSONResponse({"error": "unknown API key"}, 401)
        try:
            timeout = min(float(request.headers.get("x-request-timeout", DEFAULT_TIMEOUT)), LONGEST_TIMEOUT)
        except ValueError:
            return JSONResponse({"error": "X-Request-Timeout is not in seconds"}, 400)
        text = await request.body()
        if len(text) > LENGTHS[-1]:
            return JSONResponse({"error": f"more than {LENGTHS[-1]} bytes"}, 413)
        end = "failed"
        try:
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
