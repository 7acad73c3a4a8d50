"""Typical user code, read by type checkers and never run: what users write is understood, and answers have types."""

from collections.abc import AsyncIterator, Mapping
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import asyncmem
from asyncmem import (
    Array,
    AsyncMemoryPool,
    Batch,
    BucketPool,
    Buffer,
    Lease,
    OutOfMemoryError,
    PoolOptions,
    PoolStats,
    Pressure,
    Spillable,
)
from asyncmem.buckets import BucketStats
from asyncmem.devices import (
    Cuda,
    Device,
    DeviceInfo,
    Fence,
    GpuStream,
    Host,
    HostStream,
    Metal,
    MetalFence,
    MetalStream,
    OpenCL,
    OpenCLFence,
    OpenCLStream,
    Simulated,
    SimulatedStream,
    Stream,
    devices,
    select_device_for,
)
from asyncmem.errors import StepError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.insight import (
    AllocationTracker,
    Kind,
    LiveServer,
    Recording,
    Site,
    analyze_allocation_patterns,
    serve_live,
)
from asyncmem.pipeline import (
    AsyncBatches,
    Batches,
    Channel,
    DoubleBuffer,
    Pipeline,
    Prefetched,
    Prefetcher,
    Stage,
    StageShare,
    Transfer,
    stage,
)
from asyncmem.pipeline.parallel import (
    ParallelReport,
    ParallelStage,
    PipelineParallel,
    StepContext,
    one_forward_one_backward,
)
from asyncmem.planning import (
    InferenceMemoryEstimate,
    ModelShape,
    TrainingMemoryEstimate,
    estimate_inference_memory,
    estimate_training_memory,
    read_model,
    transformer_warmup,
    warmup_from,
)
from asyncmem.pool import Copy, GraphMemory, Pin
from asyncmem.replay import LiveReplay, Model, Recorder, Replay, Suggestion, Trace, advise, record, replay_on


def retry(facts: OutOfMemoryFacts) -> bool:
    return facts.waiting == 0


async def allocate(pool: AsyncMemoryPool) -> None:
    stream = pool.device.create_stream()
    assert_type(stream, Stream)
    buffer = await pool.allocate_async("64 MiB", stream=stream, tag="activations", priority=1, timeout=2.5)
    assert_type(buffer, Buffer)
    assert_type(buffer.nbytes, int)
    assert_type(buffer.address, int)
    assert_type(buffer.device, Device)
    assert_type(buffer.tag, str | None)
    buffer.use_on(pool.device.create_stream())
    buffer.free(stream)

    async with pool.allocate_async(4096) as other:
        assert_type(other, Buffer)
    with pool.allocate(4096) as third:
        assert_type(third, Buffer)
    assert_type(pool.try_allocate(4096), Buffer | None)


async def copies(pool: AsyncMemoryPool, numbers: NDArray[np.float32]) -> None:
    buffer = await pool.allocate_async(numbers.nbytes)
    copy = buffer.copy_from(numbers, stream=pool.device.create_stream())
    assert_type(copy, Copy)
    assert_type(await copy, None)
    assert_type(copy.done(), bool)
    await buffer.view("float32").copy_to(numbers)
    other = await pool.pinned.allocate_async(numbers.nbytes)
    await buffer.copy_to_device(other)
    with buffer.pin() as pin:
        assert_type(pin, Pin)
        assert_type(pin.address, int)
    with pool.graph() as memory:
        assert_type(memory, GraphMemory)
    memory.release()


async def request(pool: AsyncMemoryPool) -> None:
    waiting = pool.allocate_async(1 << 20)
    assert_type(waiting.done(), bool)
    assert_type(waiting.cancel(), bool)
    assert_type(waiting.result(), Buffer)
    waiting.add_done_callback(print)


async def batch(pool: AsyncMemoryPool) -> None:
    async with pool.allocate_batch([4096, "1 MiB"]) as buffers:
        assert_type(buffers, Batch)
        first, second = buffers
        assert_type(first, Buffer)
        second.free()
        assert_type(len(buffers), int)
        assert_type(buffers[0], Buffer)


async def arrays(pool: AsyncMemoryPool) -> None:
    made = await pool.empty((4096, 4096), "float32", tag="x")
    cleared = await pool.zeros(16)
    assert_type(made, asyncmem.Array)
    assert_type(cleared.buffer, Buffer)
    assert_type(made.numpy(), NDArray[np.generic])
    assert_type(made.numpy(np.float32), NDArray[np.float32])
    taken = asyncmem.asarray(np.zeros(4), stream=pool.device.create_stream())
    assert_type(taken, asyncmem.Array)
    assert_type(taken.buffer.readonly, bool)


async def many_arrays(pool: AsyncMemoryPool, like: NDArray[np.float32]) -> None:
    async with pool.empty_batch([(3, 4), 5, ((2,), "int8"), like], tag="state") as found:
        assert_type(found, asyncmem.ArrayBatch)
        assert_type(found[0], asyncmem.Array)
        assert_type(found[1:], tuple[asyncmem.Array, ...])
        assert_type(found.flat, asyncmem.Array)
    with pool.allocate_arrays([like], align=16) as now:
        assert_type(now.buffer, Buffer)


async def feed(pool: AsyncMemoryPool, loader: list[NDArray[np.float32]]) -> None:
    prefetcher = Prefetcher(pool, ahead=3, stream=pool.device.create_stream(), convert=np.from_dlpack)
    batches = prefetcher.wrap(loader)
    assert_type(batches, Prefetched)
    assert_type(iter(batches), Batches)
    assert_type(aiter(batches), AsyncBatches)
    async with batches:
        first, second = await anext(aiter(batches))
        assert first.shape == second.shape
    async with DoubleBuffer(pool, (64, 3), "float32", buffers=3) as turns:
        assert_type(turns.prefetch_next(loader[0]), Transfer)
        assert_type(await turns.swap_async(), asyncmem.Array)
        assert_type(turns.current, asyncmem.Array)


async def shares(pool: AsyncMemoryPool) -> None:
    decode = pool.budget("decode", limit="512 MiB")
    assert_type(decode, asyncmem.Budget)
    assert_type(await decode.allocate_async(4096), Buffer)
    async with pool.lease("1 GiB") as lease:
        assert_type(lease, Lease)
        assert_type(await lease.allocate_async(4096), Buffer)
    with pool.owner("loader"):
        await pool.allocate_async(1)


async def reuse(pool: AsyncMemoryPool, weights: Buffer, recording: Recording) -> None:
    analyzer = asyncmem.insight.LifetimeAnalyzer()
    analyzer.record_usage(0, {"hidden": "64 MiB"})
    analyzer.record_usage(1, [weights, weights.view("float32")])
    assert_type(analyzer.get_optimization_suggestions().reusable_bytes, int)
    assert_type(asyncmem.insight.LifetimeAnalyzer.from_trace(Trace.load("run.npz")), asyncmem.insight.LifetimeAnalyzer)
    plan = asyncmem.insight.LifetimeAnalyzer.from_records(recording).compute_reuse_plan()
    assert_type(plan, asyncmem.pool.ReusePlan)
    async with pool.apply_plan(plan, strict=True) as memory:
        assert_type(memory, asyncmem.pool.PlannedMemory)
        assert_type(await memory.allocate_async("1 MiB"), Buffer)
        assert_type(memory.allocate(key="hidden"), Buffer)
        assert_type(await memory.empty((2, 3), key="hidden"), Array)
        memory.next_step()
        assert_type(memory.use.planned, int)


async def decode(number: int, pool: StageShare) -> Buffer:
    return await pool.allocate_async(number)


@stage(workers=2, credit="1 MiB", stream="compute", timeout="2 s")
async def measure(buffer: Buffer, pool: StageShare) -> float:
    assert_type(pool.stream, Stream | None)
    return buffer.nbytes / 2


async def pipelines(pool: AsyncMemoryPool, numbers: AsyncIterator[int]) -> None:
    assert_type(measure, Stage[Buffer, float])
    async with Pipeline(decode, measure, pool=pool) as pipe:
        assert_type(pipe, Pipeline[int, float])
        async for half in pipe.map(range(10), ordered=False, in_flight=4):
            assert_type(half, float)
        async with pipe.map(numbers) as results:
            assert_type(await anext(results), float)
    assert_type(pipe.report().bottleneck, str)
    assert_type(pipe.report().stages[0].busy, float)


async def channels(pool: AsyncMemoryPool) -> None:
    async with Channel[tuple[str, Buffer]](pool, "64 MiB") as channel:
        await channel.send(("name", await channel.allocate(4096)))
        async with channel.receiver(stream=pool.device.create_stream()) as receiver:
            async for name, buffer in receiver:
                assert_type((name, buffer), tuple[str, Buffer])


async def streams(stream: Stream) -> None:
    fence = stream.record()
    assert_type(fence, Fence)
    assert_type(fence.done(), bool)
    await fence
    await stream.synchronize()


async def watch(pool: AsyncMemoryPool) -> None:
    stats = pool.stats()
    assert_type(stats, PoolStats)
    assert_type(stats.allocated_bytes, int)
    assert_type(stats.cache_hit_rate, float)
    assert_type(stats.remedies, Mapping[str, int])
    assert_type([(one.owner, one.nbytes, one.age) for one in pool.waiters()], list[tuple[str, int, float]])
    assert_type(pool.summary(), str)
    async for level in pool.pressure_changes():
        assert_type(level, Pressure)
        if level >= Pressure.HIGH:
            break


async def control(pool: AsyncMemoryPool) -> None:
    await pool.open(wait=True)
    await pool.warmup([(4096, 100), ("1 MiB", 10)])
    assert_type(await pool.trim(keep="64 MiB"), int)
    pool.empty_cache()
    pool.configure(limit="80%", timeout=None)
    pool.resize(limit="1 GiB")
    pool.check()
    pool.reset_peaks()
    await pool.aclose(timeout=1.0, drain=True)


async def move(pool: AsyncMemoryPool, buffer: Buffer) -> None:
    held = pool.spillable(buffer)
    assert_type(held, Spillable)
    async with held as home:
        assert_type(home, Buffer)
    with held.use(None, priority=1, timeout="2 s") as home:
        assert_type(home, Buffer)
    assert_type(held.spilled, bool)
    held.free()


def choose() -> None:
    options = PoolOptions(limit="80%", pregrow="1 GiB", warmup=[("4 KiB", 100)], on_oom=retry, timeout="2 s")
    assert_type(options.segment_size, int)
    assert_type(options.limit, int | float | str | None)
    AsyncMemoryPool("cuda:0", options=options, name="weights")
    AsyncMemoryPool(Simulated(capacity=1 << 30), options=PoolOptions.for_inference(), fallback="host")
    PoolOptions.from_environment({"ASYNCMEM_LIMIT": "1 GiB"}, base=options.replace(name="other"))


async def record_and_ask(pool: AsyncMemoryPool) -> None:
    async with record(pool) as recorder:
        assert_type(recorder, Recorder)
    trace = recorder.trace()
    assert_type(trace, Trace)
    assert_type(replay_on(pool, trace, lag=0.02), LiveReplay)
    advice = advise(trace, model=Model(lag=0.02))
    assert_type(advice.suggestions, tuple[Suggestion, ...])
    assert_type(advice.after, Replay)
    assert_type(advice.code("cuda:0"), str)
    AsyncMemoryPool("cuda:0", warmup=trace.warmup(), shrink_after="30 s", adaptive=False)
    await pool.warmup(trace.warmup())


async def forward(item: Buffer | int, context: StepContext) -> Buffer:
    assert_type(context.stream, Stream)
    assert_type(context.micro_batch, int)
    context.save(await context.allocate("64 MiB", use="saved"), await context.empty((4, 4), use="saved"), item)
    return await context.allocate(1 << 20, use="output")


async def backward(gradient: Buffer | None, saved: tuple[Buffer, Array, Buffer | int], context: StepContext) -> Buffer:
    context.run(saved[0].view, "float32", shape=(4, 4))
    return gradient or await context.allocate(1 << 20, use="output")


async def train(pool: AsyncMemoryPool, other: AsyncMemoryPool) -> None:
    stage = ParallelStage(forward, backward, saved="64 MiB", output=1 << 20, name="block")
    model = PipelineParallel([stage, stage], [pool, other], schedule="gpipe", timeout="30 s")
    assert_type(model.needs(8), tuple[int, ...])
    try:
        await model.run(range(8))
    except StepError as error:
        assert_type(error.micro_batch, int)
    assert_type(model.report(), ParallelReport)
    assert_type(one_forward_one_backward(4, 8).bubble([1.0] * 4, [2.0] * 4), float)


async def look(pool: AsyncMemoryPool) -> None:
    with asyncmem.tag("attention"):
        async with asyncmem.profile_memory(pool) as profile, AllocationTracker(pool, warn=False) as tracker:
            (await pool.allocate_async("1 MiB")).free()
    assert_type(profile.peak_memory(), int)
    assert_type(profile.stats, PoolStats)
    assert_type(profile.memory_summary(), str)
    for one in tracker.find_old(60):
        assert_type(one.site, Site | None)
    with Recording(pool, file="run.amem", frames=4) as recording:
        pass
    records = recording.records()
    assert_type(records[0].kind, Kind)
    assert_type(records.by("tag")[0].nbytes, int)
    assert_type(records.live(), tuple[NDArray[np.int64], NDArray[np.int64]])
    assert_type(analyze_allocation_patterns(records).warmup, tuple[tuple[int, int], ...])
    with pool.performance_context() as context:
        assert_type(context.records().peak().time, float)
    with serve_live() as server:
        assert_type(server, LiveServer)
        assert_type(server.alive, bool)


async def fail(pool: AsyncMemoryPool) -> None:
    try:
        await pool.allocate_async(1 << 40)
    except OutOfMemoryError as error:
        assert_type(error.asked, int)
        assert_type(error.largest_hole, int)
        assert_type(error.facts, OutOfMemoryFacts)


async def main() -> int:
    async with AsyncMemoryPool("host", limit="2 GiB") as pool:
        assert_type(pool, AsyncMemoryPool[Host])
        assert_type(pool.device.create_stream(), HostStream)
        return len(pool.waiters())


def know_the_device(name: str, cuda: Cuda, either: str | Simulated) -> None:
    assert_type(AsyncMemoryPool("simulated", limit="1 GiB").device.create_stream(), SimulatedStream)
    assert_type(AsyncMemoryPool("cuda:0").device, Cuda)
    assert_type(AsyncMemoryPool(cuda, options=PoolOptions()).device.create_stream(), GpuStream)
    assert_type(AsyncMemoryPool(name).device, Device)
    assert_type(AsyncMemoryPool(either).device, Device | Simulated)
    assert_type(AsyncMemoryPool().device.create_stream(), Stream)


def know_the_stream(share: StageShare[HostStream], context: StepContext[SimulatedStream]) -> None:
    assert_type(share.stream, HostStream)
    assert_type(context.stream, SimulatedStream)


def run() -> None:
    assert_type(asyncmem.run(main), int)
    runtime = asyncmem.device("host")
    assert_type(runtime.memory_allocated(), int)
    assert_type(runtime.memory_summary(), str)
    runtime.empty_cache()


def plan() -> None:
    model = read_model("config.json")
    assert_type(model, ModelShape)
    serving = InferenceMemoryEstimate(model=model, seq_len=8192, batch=4, kv_bytes=1)
    assert_type(serving.at(batch=8), InferenceMemoryEstimate)
    assert_type(serving.total, int)
    training = estimate_training_memory(4096, 14336, 32, 32000, 32, 8, 4096, "bf16", optimizer="adamw_8bit")
    assert_type(training, TrainingMemoryEstimate)
    assert_type(warmup_from(training), list[tuple[int, int]])
    assert_type(select_device_for(serving, prefer=("cuda:1", "host")), str)
    assert_type(devices(), tuple[DeviceInfo, ...])
    few = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 2)
    AsyncMemoryPool("auto", need=few)
    AsyncMemoryPool("cuda:0", need="30 GiB", warmup=transformer_warmup(4, 2048, 4096))


def use_opencl(device: OpenCL, array: Array) -> None:
    stream = device.create_stream()
    assert_type(stream, OpenCLStream)
    assert_type(stream.record(), OpenCLFence)
    assert_type(device.record_all(), OpenCLFence)
    for part in (array, array.buffer):
        device.pointer(part)


def use_metal(device: Metal, array: Array) -> None:
    stream = device.create_stream()
    assert_type(stream, MetalStream)
    assert_type(stream.record(), MetalFence)
    assert_type(device.record_all(), MetalFence)
    for part in (array, array.buffer):
        _, offset = device.as_buffer(part)
        assert_type(offset, int)


def keep_buffers() -> None:
    buffers: BucketPool[bytearray] = BucketPool(max_pooled_per_bucket=4, limit="1 GiB")
    assert_type(buffers.try_get("64 KiB"), bytearray | None)
    assert_type(buffers.return_buffer(bytearray(8), 8), bool)
    assert_type(buffers.stats(), BucketStats)
    assert_type(buffers.pressure, Pressure)
