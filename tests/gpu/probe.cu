// What the driver charges: the figures of docs/explanation/what-the-driver-charges.md. Nothing else may use the card.
//   nvcc -O2 -std=c++17 -arch=native -o probe probe.cu -lcuda && CUDA_DEVICE_MAX_CONNECTIONS=32 ./probe
// An argument names a part: calls, order, vmm, contention, synchronizes, completion, rest. One process a part is best.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>
#include <functional>
#include <poll.h>
#include <string>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

typedef unsigned long long u64;
static inline double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}
static void spin_for(double ns) {
    double e = now() + ns;
    while (now() < e) {}
}
static void nap(double ns) {
    timespec t{(time_t)(ns / 1e9), (long)((u64)ns % 1000000000ull)};
    nanosleep(&t, nullptr);
}
static std::string name_of(CUresult r) {
    const char *n = nullptr;
    cuGetErrorName(r, &n);
    return n ? std::string(n).substr(0, 48) : std::to_string(r);
}
static CUresult ck_(CUresult r, const char *what, int line) {
    if (r) printf("!! line %d: %s -> %d %s\n", line, what, (int)r, name_of(r).c_str());
    return r;
}
#define CK(x) ck_((x), #x, __LINE__)

__global__ void k_empty() {}
// Ends when *flag >= value, or after 3 s so that nothing hangs for ever.
__global__ void k_wait(volatile int *flag, int value) {
    u64 t0, t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    while (*flag < value) {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
        if (t - t0 > 3000000000ull) break;
    }
}
__global__ void k_ns(u64 ns) {
    u64 t0, t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); } while (t - t0 < ns);
}
static CUfunction f_empty, f_wait, f_ns;
static CUdevice dev;
static CUcontext ctx;
static volatile int *flag;
static CUdeviceptr dflag;
static int launch_empty(CUstream s) { return cuLaunchKernel(f_empty, 1, 1, 1, 1, 1, 1, 0, s, nullptr, nullptr); }
static int launch_wait(CUstream s, int v) {
    void *a[] = {&dflag, &v};
    return cuLaunchKernel(f_wait, 1, 1, 1, 1, 1, 1, 0, s, a, nullptr);
}
static int launch_ns(CUstream s, u64 ns) {
    void *a[] = {&ns};
    return cuLaunchKernel(f_ns, 1, 1, 1, 1, 1, 1, 0, s, a, nullptr);
}
static CUmemAllocationProp prop() {
    CUmemAllocationProp p{};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = dev;
    return p;
}
static CUmemAccessDesc access_() {
    CUmemAccessDesc a{};
    a.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    a.location.id = dev;
    a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return a;
}
static const size_t M = 1 << 20;
template <class F> static double best(int n, F f, int repeats = 5) {
    double b = 1e18;
    for (int r = 0; r < repeats; r++) {
        double t = now();
        for (int i = 0; i < n; i++) f();
        b = std::min(b, (now() - t) / n);
    }
    return b;
}

// Part 1 of the output.
static void calls() {
    CUstream s, busy;
    CK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    CK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
    CUevent done, open, e;
    CK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
    CK(cuEventCreate(&open, CU_EVENT_DISABLE_TIMING));
    CK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    CK(cuEventRecord(done, s));
    CK(cuStreamSynchronize(s));
    CUmemoryPool pool;
    CUmemPoolProps pp{};
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = dev;
    CK(cuMemPoolCreate(&pool, &pp));
    cuuint64_t keep = ~0ull;
    CK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    {
        CUdeviceptr d;
        CK(cuMemAllocFromPoolAsync(&d, 1 << 20, pool, s));
        CK(cuMemFreeAsync(d, s));
        CK(cuStreamSynchronize(s));
    }
    struct Row {
        const char *name;
        int n;
        std::function<void()> f;
    };
    CUstreamCaptureStatus st;
    u64 id;
    CUcontext cur;
    size_t fr, to;
    std::vector<Row> rows = {
        {"empty std::function", 200000, [&] {}},
        {"cuEventRecord idle stream", 20000, [&] { cuEventRecord(e, s); }},
        {"cuEventRecord busy stream", 150, [&] { cuEventRecord(e, busy); }},
        {"cuEventQuery done", 50000, [&] { cuEventQuery(done); }},
        {"cuEventQuery pending", 50000, [&] { cuEventQuery(open); }},
        {"cuStreamWaitEvent done", 20000, [&] { cuStreamWaitEvent(s, done, 0); }},
        {"cuStreamQuery idle", 20000, [&] { cuStreamQuery(s); }},
        {"cuStreamIsCapturing", 50000, [&] { cuStreamIsCapturing(s, &st); }},
        {"cuStreamGetId", 50000, [&] { cuStreamGetId(s, &id); }},
        {"cuStreamGetCaptureInfo", 50000,
            [&] { cuStreamGetCaptureInfo(s, &st, (cuuint64_t *)&id, nullptr, nullptr, nullptr, nullptr); }},
        {"cuStreamGetCtx", 50000, [&] { cuStreamGetCtx(s, &cur); }},
        {"cuCtxGetCurrent", 50000, [&] { cuCtxGetCurrent(&cur); }},
        {"cuCtxPush+PopCurrent", 50000,
            [&] {
                cuCtxPushCurrent(ctx);
                cuCtxPopCurrent(&cur);
            }},
        {"cuThreadExchangeStreamCaptureMode x2", 50000,
            [&] {
                CUstreamCaptureMode m = CU_STREAM_CAPTURE_MODE_RELAXED;
                cuThreadExchangeStreamCaptureMode(&m);
                cuThreadExchangeStreamCaptureMode(&m);
            }},
        {"cuCtxRecordEvent (one stream busy)", 60, [&] { cuCtxRecordEvent(ctx, e); }},
        {"cuEventCreate+Destroy", 20000,
            [&] {
                CUevent x;
                cuEventCreate(&x, CU_EVENT_DISABLE_TIMING);
                cuEventDestroy(x);
            }},
        {"cuEventCreate+Record+Query+Destroy", 20000,
            [&] {
                CUevent x;
                cuEventCreate(&x, CU_EVENT_DISABLE_TIMING);
                cuEventRecord(x, s);
                cuEventQuery(x);
                cuEventDestroy(x);
            }},
        {"cuMemAllocFromPoolAsync+Free warm", 5000,
            [&] {
                CUdeviceptr d;
                cuMemAllocFromPoolAsync(&d, 1 << 20, pool, s);
                cuMemFreeAsync(d, s);
            }},
        {"cuMemGetInfo", 300, [&] { cuMemGetInfo(&fr, &to); }},
        {"launch empty kernel", 1500, [&] { launch_empty(s); }},
    };
    printf("\n## 1 ns a call: alone | other thread record+query | other thread launches\n");
    std::atomic<int> mode{0};
    std::atomic<bool> stop{false};
    std::thread other([&] {
        CK(cuCtxSetCurrent(ctx));
        CUstream t;
        cuStreamCreate(&t, CU_STREAM_NON_BLOCKING);
        CUevent x;
        cuEventCreate(&x, CU_EVENT_DISABLE_TIMING);
        while (!stop) {
            int m = mode;
            if (m == 1) {
                cuEventRecord(x, t);
                cuEventQuery(x);
            } else if (m == 2) {
                launch_empty(t);
            } else nap(20000);
        }
        cuStreamSynchronize(t);
        cuEventDestroy(x);
        cuStreamDestroy(t);
    });
    for (auto &r : rows) {
        double v[3];
        for (int m = 0; m < 3; m++) {
            mode = m;
            nap(300000);
            *flag = 0;
            launch_wait(busy, 1);
            cuEventRecord(open, busy);
            v[m] = best(r.n, r.f, 3);
            *flag = 1;
            cuStreamSynchronize(busy);
            cuStreamSynchronize(s);
        }
        mode = 0;
        printf("%-38s %8.0f %8.0f %8.0f\n", r.name, v[0], v[1], v[2]);
    }
    stop = true;
    other.join();
    // What works in a thread where no context is current.
    std::thread([&] {
        CUcontext c = nullptr;
        cuCtxGetCurrent(&c);
        CUevent x;
        printf("no context current (%p): record %d query %d wait %d capturing %d getid %d ctxrecord %d create %d "
               "legacy-record %d ptds-record %d ptds-getid %d launch %d\n",
            (void *)c, cuEventRecord(e, s), cuEventQuery(e), cuStreamWaitEvent(s, e, 0), cuStreamIsCapturing(s, &st),
            cuStreamGetId(s, &id), cuCtxRecordEvent(ctx, e), cuEventCreate(&x, CU_EVENT_DISABLE_TIMING),
            cuEventRecord(e, CU_STREAM_LEGACY), cuEventRecord(e, CU_STREAM_PER_THREAD),
            cuStreamGetId(CU_STREAM_PER_THREAD, &id), launch_empty(s));
    }).join();
    // cuCtxRecordEvent against the number of streams
    for (int n : {16, 64, 256}) {
        std::vector<CUstream> v(n);
        for (auto &x : v) {
            cuStreamCreate(&x, CU_STREAM_NON_BLOCKING);
            launch_empty(x);
        }
        cuCtxSynchronize();
        printf(
            "cuCtxRecordEvent with %d more streams: %.0f ns; ", n, best(500, [&] { cuCtxRecordEvent(ctx, done); }, 3));
        for (auto &x : v) launch_empty(x);
        printf("just after work on all: %.0f ns\n", best(
                                                        1,
                                                        [&] {
                                                            for (auto &x : v) launch_empty(x);
                                                            double t = now();
                                                            cuCtxRecordEvent(ctx, done);
                                                            t = now() - t;
                                                            printf("[%.0f] ", t);
                                                        },
                                                        3));
        cuCtxSynchronize();
        for (auto &x : v) cuStreamDestroy(x);
    }
    cuMemPoolDestroy(pool);
    cuStreamDestroy(s);
    cuStreamDestroy(busy);
}

// Part 2, 3 of the output.
static void order() {
    printf("\n## 2, 3 what a record covers (work spins on the row's stream; 'covers' = query says not ready)\n");
    CUstream block, non;
    CK(cuStreamCreate(&block, CU_STREAM_DEFAULT));
    CK(cuStreamCreate(&non, CU_STREAM_NON_BLOCKING));
    CUevent e;
    CK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
    auto in_thread = [&](std::function<void()> f) {
        std::thread t([&] {
            cuCtxSetCurrent(ctx);
            f();
        });
        t.join();
    };
    struct Work {
        const char *name;
        std::function<void()> start;
    };
    std::vector<Work> works = {{"blocking stream", [&] { launch_wait(block, 1); }},
        {"non-blocking stream", [&] { launch_wait(non, 1); }},
        {"legacy default", [&] { launch_wait(CU_STREAM_LEGACY, 1); }},
        {"per-thread, this thread", [&] { launch_wait(CU_STREAM_PER_THREAD, 1); }},
        {"per-thread, ended thread", [&] { in_thread([&] { launch_wait(CU_STREAM_PER_THREAD, 1); }); }}};
    struct Rec {
        const char *name;
        std::function<int()> rec;
    };
    std::vector<Rec> recs = {{"ctxRecordEvent", [&] { return (int)cuCtxRecordEvent(ctx, e); }},
        {"record legacy", [&] { return (int)cuEventRecord(e, CU_STREAM_LEGACY); }},
        {"record null", [&] { return (int)cuEventRecord(e, nullptr); }},
        {"record per-thread", [&] { return (int)cuEventRecord(e, CU_STREAM_PER_THREAD); }},
        {"per-thread, other thread",
            [&] {
                int r = -1;
                in_thread([&] { r = cuEventRecord(e, CU_STREAM_PER_THREAD); });
                return r;
            }},
        {"record non-blocking", [&] { return (int)cuEventRecord(e, non); }}};
    for (auto &w : works) {
        printf("%-26s", w.name);
        for (auto &r : recs) {
            cuCtxSynchronize();
            *flag = 0;
            w.start();
            double t = now();
            int code = r.rec();
            t = now() - t;
            nap(500000);
            int q = cuEventQuery(e);
            *flag = 1;
            cuCtxSynchronize();
            int q2 = cuEventQuery(e);
            printf(" | %s: %s%s%s", r.name,
                code ? name_of((CUresult)code).c_str()
                     : (q == CUDA_ERROR_NOT_READY ? "covers"
                           : q == 0               ? "NOT"
                                                  : name_of((CUresult)q).c_str()),
                q2 ? " (!then not done)" : "", t > 1e5 ? " (slow)" : "");
        }
        printf("\n");
    }
    { // later work must not hold an all-streams fence back, and it must not hold other streams back
        cuCtxSynchronize();
        *flag = 0;
        int r = cuCtxRecordEvent(ctx, e);
        launch_wait(non, 1);
        nap(500000);
        printf("ctxRecordEvent, then spin: %d, query %d (0: later work is not covered)\n", r, cuEventQuery(e));
        CUstream o;
        cuStreamCreate(&o, CU_STREAM_NON_BLOCKING);
        r = cuCtxRecordEvent(ctx, e);
        CUevent f;
        cuEventCreate(&f, CU_EVENT_DISABLE_TIMING);
        launch_empty(o);
        cuEventRecord(f, o);
        nap(500000);
        printf("while an all-streams fence waits, another stream runs on: %s\n", cuEventQuery(f) == 0 ? "yes" : "NO");
        launch_empty(block);
        cuEventRecord(f, block);
        nap(500000);
        printf("  and a blocking stream: %s\n", cuEventQuery(f) == 0 ? "yes" : "NO");
        launch_empty(CU_STREAM_LEGACY);
        cuEventRecord(f, CU_STREAM_LEGACY);
        nap(500000);
        printf("  and the legacy stream: %s\n", cuEventQuery(f) == 0 ? "yes" : "NO");
        r = cuStreamWaitEvent(o, e, 0);
        launch_empty(o);
        cuEventRecord(f, o);
        nap(500000);
        int q = cuEventQuery(f);
        printf("  streamWaitEvent on it: %d, waits: %s\n", r, q == CUDA_ERROR_NOT_READY ? "yes" : "NO");
        *flag = 1;
        cuCtxSynchronize();
        cuEventDestroy(f);
        cuStreamDestroy(o);
    }
    {
        u64 a = 0, b = 0, c = 0, d = 0, l = 0, n0 = 0;
        cuStreamGetId(CU_STREAM_PER_THREAD, &a);
        in_thread([&] { cuStreamGetId(CU_STREAM_PER_THREAD, &b); });
        in_thread([&] { cuStreamGetId(CU_STREAM_PER_THREAD, &d); });
        cuStreamGetId(CU_STREAM_LEGACY, &l);
        cuStreamGetId(nullptr, &n0);
        cuStreamGetId(non, &c);
        printf("stream ids: per-thread main %llu, thread %llu, next thread %llu; legacy %llu, null %llu; non-blocking "
               "%llu\n",
            a, b, d, l, n0, c);
    }
    {
        int same = 0, sameid = 0;
        CUstream p = nullptr;
        u64 pid = 0;
        for (int i = 0; i < 100; i++) {
            CUstream s;
            u64 id;
            cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
            cuStreamGetId(s, &id);
            same += s == p;
            sameid += id == pid;
            p = s;
            pid = id;
            cuStreamDestroy(s);
        }
        printf("destroy+create 100 times: same handle %d, same id %d\n", same, sameid);
    }
    printf("capture: calls made while a stream is captured. Columns: the capturing thread [global local relaxed], the "
           "same with the caller's mode relaxed; then another thread, likewise. code, x: the capture died\n");
    CUmemoryPool pool;
    CUmemPoolProps pp{};
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = dev;
    cuMemPoolCreate(&pool, &pp);
    CUevent done;
    cuEventCreate(&done, CU_EVENT_DISABLE_TIMING);
    cuEventRecord(done, non);
    cuCtxSynchronize();
    auto create = [&] {
        CUmemAllocationProp p = prop();
        CUmemGenericAllocationHandle h;
        CUresult r = cuMemCreate(&h, 2 * M, &p, 0);
        if (!r) cuMemRelease(h);
        return (int)r;
    };
    auto vmm = [&] {
        CUmemAllocationProp p = prop();
        CUmemGenericAllocationHandle h;
        CUdeviceptr a;
        int r = cuMemCreate(&h, 2 * M, &p, 0);
        if (r) return r;
        cuMemAddressReserve(&a, 2 * M, 0, 0, 0);
        int m = cuMemMap(a, 2 * M, 0, h, 0);
        CUmemAccessDesc d = access_();
        int s = cuMemSetAccess(a, 2 * M, &d, 1);
        int u = cuMemUnmap(a, 2 * M);
        cuMemRelease(h);
        cuMemAddressFree(a, 2 * M);
        return m ? m : s ? s : u;
    };
    CUstream cap;
    cuStreamCreate(&cap, CU_STREAM_NON_BLOCKING);
    struct Call {
        const char *name;
        std::function<int()> f;
    };
    std::vector<Call> list = {{"eventQuery", [&] { return (int)cuEventQuery(done); }},
        {"eventRecord other stream", [&] { return (int)cuEventRecord(e, non); }},
        {"eventCreate+destroy",
            [&] {
                CUevent x;
                int r = cuEventCreate(&x, CU_EVENT_DISABLE_TIMING);
                if (!r) cuEventDestroy(x);
                return r;
            }},
        {"streamWaitEvent other", [&] { return (int)cuStreamWaitEvent(non, done, 0); }},
        {"ctxRecordEvent", [&] { return (int)cuCtxRecordEvent(ctx, e); }},
        {"record legacy", [&] { return (int)cuEventRecord(e, CU_STREAM_LEGACY); }},
        {"isCapturing legacy",
            [&] {
                CUstreamCaptureStatus st;
                return (int)cuStreamIsCapturing(CU_STREAM_LEGACY, &st);
            }},
        {"isCapturing the stream",
            [&] {
                CUstreamCaptureStatus st;
                int r = cuStreamIsCapturing(cap, &st);
                return r ? r : 10000 + (int)st;
            }},
        {"streamQuery the stream", [&] { return (int)cuStreamQuery(cap); }},
        {"streamGetId the stream",
            [&] {
                u64 i;
                return (int)cuStreamGetId(cap, &i);
            }},
        {"eventSynchronize", [&] { return (int)cuEventSynchronize(done); }},
        {"streamSynchronize other", [&] { return (int)cuStreamSynchronize(non); }}, {"memCreate", create},
        {"create..map..unmap", vmm},
        {"memAlloc+free",
            [&] {
                CUdeviceptr d;
                int r = cuMemAlloc(&d, 2 * M);
                return r ? r : (int)cuMemFree(d);
            }},
        {"allocFromPool+freeAsync",
            [&] {
                CUdeviceptr d;
                int r = cuMemAllocFromPoolAsync(&d, 2 * M, pool, non);
                return r ? r : (int)cuMemFreeAsync(d, non);
            }},
        {"poolTrim", [&] { return (int)cuMemPoolTrimTo(pool, 0); }},
        {"memGetInfo",
            [&] {
                size_t a, b;
                return (int)cuMemGetInfo(&a, &b);
            }},
        {"hostAlloc+free",
            [&] {
                void *p;
                int r = cuMemHostAlloc(&p, M, 0);
                return r ? r : (int)cuMemFreeHost(p);
            }},
        {"launch other", [&] { return launch_empty(non); }},
        {"launchHostFunc other", [&] { return (int)cuLaunchHostFunc(non, [](void *) {}, nullptr); }}};
    const CUstreamCaptureMode modes[] = {
        CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED};
    const char *mn[] = {"global", "local", "relaxed"};
    for (auto &c : list) {
        printf("%-26s", c.name);
        for (int where = 0; where < 2; where++)
            for (int relaxed = 0; relaxed < 2; relaxed++)
                for (int m = 0; m < 3; m++) {
                    cuCtxSynchronize();
                    int b = cuStreamBeginCapture(cap, modes[m]);
                    launch_empty(cap);
                    int code = -1;
                    auto go = [&] {
                        CUstreamCaptureMode k = CU_STREAM_CAPTURE_MODE_RELAXED;
                        if (relaxed) cuThreadExchangeStreamCaptureMode(&k);
                        code = c.f();
                        if (relaxed) cuThreadExchangeStreamCaptureMode(&k);
                    };
                    if (where) in_thread(go);
                    else go();
                    CUgraph g = nullptr;
                    int end = cuStreamEndCapture(cap, &g);
                    if (g) cuGraphDestroy(g);
                    printf("%s%d%s%s", m ? " " : " | ", code, b ? "begin!" : "", end ? "x" : "");
                }
        printf("\n");
    }
    for (int m = 0; m < 3; m++) {
        cuCtxSynchronize();
        cuStreamBeginCapture(block, modes[m]);
        launch_empty(block);
        CUstreamCaptureStatus st = (CUstreamCaptureStatus)9;
        int c1 = cuStreamIsCapturing(CU_STREAM_LEGACY, &st), c2 = cuEventQuery(done), c3 = cuCtxRecordEvent(ctx, e),
            c4 = -1;
        CUgraph g = nullptr;
        int end = cuStreamEndCapture(block, &g);
        if (g) cuGraphDestroy(g);
        g = nullptr;
        cuStreamBeginCapture(block, modes[m]);
        in_thread([&] { c4 = cuEventRecord(e, CU_STREAM_LEGACY); });
        int end2 = cuStreamEndCapture(block, &g);
        if (g) cuGraphDestroy(g);
        printf("blocking stream captured (%s): isCapturing(legacy) %d (status %d) query %d ctxRecord %d, end %d; other "
               "thread records legacy %d, end %d\n",
            mn[m], c1, (int)st, c2, c3, end, c4, end2);
    }
    cuCtxSynchronize();
    cuMemPoolDestroy(pool);
    cuEventDestroy(e);
    cuEventDestroy(done);
    cuStreamDestroy(cap);
    cuStreamDestroy(block);
    cuStreamDestroy(non);
}

// Part 4 of the output.
struct Timer {
    double sum = 0, mx = 0;
    int n = 0;
    template <class F> void operator()(F f) {
        double t = now();
        f();
        t = now() - t;
        sum += t;
        mx = std::max(mx, t);
        n++;
    }
};
static void vmm() {
    printf("\n## 4a VMM, us: sum (longest call); 'set each' = access set a handle at a time, 'unmap each' likewise; "
           "memset of the range once\n");
    printf("%6s %7s %5s | %-16s %-14s %-9s %-16s | %-9s %-16s %-16s | %s\n", "MiB", "handle", "n", "create", "map",
        "set once", "set each", "unmap all", "unmap each", "release", "grow(sum)+drop(sum) us");
    CUmemAllocationProp p = prop();
    CUmemAccessDesc a = access_();
    for (size_t total : {64, 256, 1024})
        for (size_t h : {(size_t)2, (size_t)20, (size_t)32, (size_t)64, (size_t)128, (size_t)256, total}) {
            if (h > total || (h == total && (total == 64 || total == 256) && false)) continue;
            size_t n = total / h, span = n * h * M;
            CUdeviceptr va;
            CK(cuMemAddressReserve(&va, span, 0, 0, 0));
            Timer best_c, best_m, best_s, best_se, best_u, best_ue, best_r;
            double best_sum = 1e18, bs = 0, bd = 0;
            for (int rep = 0; rep < 4; rep++) {
                std::vector<CUmemGenericAllocationHandle> hs(n);
                Timer c, m, s, se, u, u_each, r;
                for (auto &x : hs) c([&] { CK(cuMemCreate(&x, h * M, &p, 0)); });
                for (size_t i = 0; i < n; i++) m([&] { CK(cuMemMap(va + i * h * M, h * M, 0, hs[i], 0)); });
                bool each = rep % 2;
                if (each)
                    for (size_t i = 0; i < n; i++) se([&] { CK(cuMemSetAccess(va + i * h * M, h * M, &a, 1)); });
                else s([&] { CK(cuMemSetAccess(va, span, &a, 1)); });
                cuMemsetD8(va, 1, span);
                cuCtxSynchronize();
                if (each)
                    for (size_t i = 0; i < n; i++) u_each([&] { CK(cuMemUnmap(va + i * h * M, h * M)); });
                else u([&] { CK(cuMemUnmap(va, span)); });
                for (auto x : hs) r([&] { CK(cuMemRelease(x)); });
                if (each) {
                    if (!best_se.n || se.sum < best_se.sum) best_se = se;
                    if (!best_ue.n || u_each.sum < best_ue.sum) best_ue = u_each;
                    continue;
                }
                double sum = c.sum + m.sum + s.sum + u.sum + r.sum;
                if (sum < best_sum) {
                    best_sum = sum;
                    best_c = c;
                    best_m = m;
                    best_s = s;
                    best_u = u;
                    best_r = r;
                    bs = c.sum + m.sum + s.sum;
                    bd = u.sum + r.sum;
                }
            }
            auto f = [](Timer &t) {
                char b[40];
                snprintf(b, 40, "%.0f (%.1f)", t.sum / 1e3, t.mx / 1e3);
                return std::string(b);
            };
            printf("%6zu %7zu %5zu | %-16s %-14s %-9.0f %-16s | %-9.0f %-16s %-16s | %.0f + %.0f\n", total, h, n,
                f(best_c).c_str(), f(best_m).c_str(), best_s.sum / 1e3, f(best_se).c_str(), best_u.sum / 1e3,
                f(best_ue).c_str(), f(best_r).c_str(), bs / 1e3, bd / 1e3);
            cuMemAddressFree(va, span);
        }
    { // one unmap over part of a run of mappings; releasing the handle before the unmap; address range 1 TiB
        CUdeviceptr va;
        double t = now();
        int r = cuMemAddressReserve(&va, (size_t)1 << 40, 0, 0, 0);
        t = now() - t;
        printf("reserve 1 TiB: %d, %.1f us; free ", r, t / 1e3);
        CUmemGenericAllocationHandle x;
        cuMemCreate(&x, 64 * M, &p, 0);
        CK(cuMemMap(va, 64 * M, 0, x, 0));
        double q = now();
        cuMemRelease(x);
        q = now() - q;
        CK(cuMemSetAccess(va, 64 * M, &a, 1));
        CK(cuMemsetD8(va, 0, 64 * M));
        cuCtxSynchronize();
        printf("(release before unmap %.1f us, ", q / 1e3);
        q = now();
        int part = cuMemUnmap(va, 32 * M);
        int all = cuMemUnmap(va, 64 * M);
        q = now() - q;
        printf("unmap half -> %d, unmap whole -> %d %.1f us) ", part, all, q / 1e3);
        t = now();
        r = cuMemAddressFree(va, (size_t)1 << 40);
        printf("%d, %.1f us\n", r, (now() - t) / 1e3);
        size_t g0, g1;
        cuMemGetAllocationGranularity(&g0, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        cuMemGetAllocationGranularity(&g1, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
        printf("granularity minimum %zu recommended %zu\n", g0, g1);
    }
}

static std::atomic<int> phase{0};
static void contention() {
    printf("\n## 4b the loop's thread (empty launch + record + query each 100 us) while another thread makes one kind "
           "of call; us\n");
    struct Stat {
        std::vector<float> d;
        double call = 0, callmax = 0;
        int calls = 0;
    };
    const int P = 40;
    std::vector<Stat> st(P);
    std::atomic<bool> stop{false};
    std::vector<std::string> names(P);
    names[0] = "(nothing)";
    std::thread loop([&] {
        cuCtxSetCurrent(ctx);
        CUstream s;
        cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
        CUevent e;
        cuEventCreate(&e, CU_EVENT_DISABLE_TIMING);
        while (!stop) {
            int p0 = phase;
            double t = now();
            launch_empty(s);
            cuEventRecord(e, s);
            cuEventQuery(e);
            t = now() - t;
            int p1 = phase;
            int p = p0 ? p0 : p1;
            if (p < P) st[p].d.push_back((float)(t / 1e3));
            spin_for(p0 ? 20000 : 60000); // denser while the other thread is at it
        }
        cuStreamSynchronize(s);
    });
    nap(100e6);
    int next = 1;
    auto run = [&](const char *name, int reps, std::function<void()> before, std::function<void()> call,
                   std::function<void()> after) {
        int p = next++;
        names[p] = name;
        for (int i = 0; i < reps; i++) {
            if (before) before();
            nap(150000);
            double t = now();
            phase = p;
            call();
            phase = 0;
            t = (now() - t) / 1e3;
            st[p].call += t;
            st[p].callmax = std::max(st[p].callmax, t);
            st[p].calls++;
            nap(50000);
            if (after) after();
        }
    };
    CUmemAllocationProp p = prop();
    CUmemAccessDesc a = access_();
    CUdeviceptr va;
    cuMemAddressReserve(&va, 1024 * M, 0, 0, 0);
    std::vector<CUmemGenericAllocationHandle> hs;
    auto mk = [&](size_t h, size_t total) {
        hs.assign(total / h, 0);
        for (auto &x : hs) CK(cuMemCreate(&x, h * M, &p, 0));
    };
    auto mp = [&](size_t h) {
        for (size_t i = 0; i < hs.size(); i++) CK(cuMemMap(va + i * h * M, h * M, 0, hs[i], 0));
    };
    auto rel = [&] {
        for (auto x : hs) CK(cuMemRelease(x));
        hs.clear();
    };
    struct Shape {
        const char *n;
        size_t h, total;
    };
    Shape shapes[] = {{"64 in 1", 64, 64}, {"256 in 1", 256, 256}, {"1024 in 1", 1024, 1024},
        {"1024 in 32 MiB", 32, 1024}, {"1024 in 2 MiB", 2, 1024}};
    static char buf[P][64];
    int k = 0;
    auto nm = [&](const char *c, const char *s) {
        snprintf(buf[k], 64, "%s %s", c, s);
        return (const char *)buf[k++];
    };
    for (auto &s : shapes) {
        int reps = s.h == 2 ? 4 : 15;
        run(nm("create", s.n), reps, nullptr, [&] { mk(s.h, s.total); }, rel);
        run(
            nm("set access", s.n), reps,
            [&] {
                mk(s.h, s.total);
                mp(s.h);
            },
            [&] { CK(cuMemSetAccess(va, s.total * M, &a, 1)); },
            [&] {
                cuMemUnmap(va, s.total * M);
                rel();
            });
        run(
            nm("unmap", s.n), reps,
            [&] {
                mk(s.h, s.total);
                mp(s.h);
                cuMemSetAccess(va, s.total * M, &a, 1);
            },
            [&] { CK(cuMemUnmap(va, s.total * M)); }, rel);
        run(nm("release", s.n), reps, [&] { mk(s.h, s.total); }, rel, nullptr);
    }
    CUmemoryPool pool;
    CUmemPoolProps pp{};
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = dev;
    CK(cuMemPoolCreate(&pool, &pp));
    cuuint64_t keep = ~0ull;
    CK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    CUstream w;
    cuStreamCreate(&w, CU_STREAM_NON_BLOCKING);
    CUdeviceptr d;
    for (size_t n : {64, 256, 1024}) {
        char t[16];
        snprintf(t, 16, "%zu", n);
        run(
            nm("cold allocFromPoolAsync", t), 10, nullptr, [&] { CK(cuMemAllocFromPoolAsync(&d, n * M, pool, w)); },
            [&] {
                cuMemFreeAsync(d, w);
                cuStreamSynchronize(w);
                cuMemPoolTrimTo(pool, 0);
            });
        run(
            nm("poolTrimTo", t), 10,
            [&] {
                cuMemAllocFromPoolAsync(&d, n * M, pool, w);
                cuMemFreeAsync(d, w);
                cuStreamSynchronize(w);
            },
            [&] { CK(cuMemPoolTrimTo(pool, 0)); }, nullptr);
        run(nm("memAlloc", t), 10, nullptr, [&] { CK(cuMemAlloc(&d, n * M)); }, [&] { cuMemFree(d); });
        run(nm("memFree", t), 10, [&] { cuMemAlloc(&d, n * M); }, [&] { CK(cuMemFree(d)); }, nullptr);
    }
    void *hp;
    run("memHostAlloc 64", 4, nullptr, [&] { CK(cuMemHostAlloc(&hp, 64 * M, 0)); }, [&] { cuMemFreeHost(hp); });
    run("memFreeHost 64", 4, [&] { cuMemHostAlloc(&hp, 64 * M, 0); }, [&] { cuMemFreeHost(hp); }, nullptr);
    size_t x, y;
    run(
        "memGetInfo x100", 10, nullptr,
        [&] {
            for (int i = 0; i < 100; i++) cuMemGetInfo(&x, &y);
        },
        nullptr);
    CUevent ev;
    cuEventCreate(&ev, CU_EVENT_DISABLE_TIMING);
    run(
        "eventSynchronize 1 ms away", 10,
        [&] {
            launch_ns(w, 1200000);
            cuEventRecord(ev, w);
        },
        [&] { cuEventSynchronize(ev); }, nullptr);
    CUevent eb;
    cuEventCreate(&eb, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    run(
        "eventSynchronize blocking 1 ms", 10,
        [&] {
            launch_ns(w, 1200000);
            cuEventRecord(eb, w);
        },
        [&] { cuEventSynchronize(eb); }, nullptr);
    stop = true;
    loop.join();
    printf("%-32s %9s %9s | loop: %6s %8s %8s %8s %6s\n", "call", "mean", "longest", "n", "p50", "p99", "max", ">50us");
    for (int i = 0; i < next; i++) {
        auto &d = st[i].d;
        std::sort(d.begin(), d.end());
        if (d.empty()) {
            printf("%-32s no samples\n", names[i].c_str());
            continue;
        }
        int over = 0;
        for (float v : d) over += v > 50;
        printf("%-32s %9.1f %9.1f | %12zu %8.1f %8.1f %8.1f %6d\n", names[i].c_str(),
            st[i].calls ? st[i].call / st[i].calls : 0, st[i].callmax, d.size(), d[d.size() / 2],
            d[(size_t)(d.size() * .99)], d.back(), over);
    }
    cuMemPoolDestroy(pool);
    cuMemAddressFree(va, 1024 * M);
    cuStreamDestroy(w);
}

static void synchronizes() {
    printf("\n## 4c does the call wait for running work? (a kernel spins on another stream for 30 ms; us the call "
           "took)\n");
    CUstream s, w;
    cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
    cuStreamCreate(&w, CU_STREAM_NON_BLOCKING);
    CUmemAllocationProp p = prop();
    CUmemAccessDesc a = access_();
    CUdeviceptr va, d;
    cuMemAddressReserve(&va, 64 * M, 0, 0, 0);
    CUmemGenericAllocationHandle h = 0;
    CUmemoryPool pool;
    CUmemPoolProps pp{};
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = dev;
    cuMemPoolCreate(&pool, &pp);
    cuuint64_t keep = ~0ull;
    CK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    auto test = [&](const char *n, std::function<int()> f) {
        cuCtxSynchronize();
        *flag = 0;
        launch_wait(s, 1);
        nap(300000);
        std::thread t([&] {
            nap(30e6);
            *flag = 1;
        });
        double q = now();
        int r = f();
        q = now() - q;
        t.join();
        cuStreamSynchronize(s);
        printf("  %s: %.0f%s%s\n", n, q / 1e3, q > 15e6 ? " WAITS" : "", r ? (" " + name_of((CUresult)r)).c_str() : "");
    };
    void *hp = nullptr;
    void *reg = aligned_alloc(4096, M);
    CUevent e;
    CUstream t;
    cuEventCreate(&e, CU_EVENT_DISABLE_TIMING);
    cuStreamCreate(&t, CU_STREAM_NON_BLOCKING);
    CUcontext c2;
    test("memCreate", [&] { return cuMemCreate(&h, 64 * M, &p, 0); });
    test("memMap", [&] { return cuMemMap(va, 64 * M, 0, h, 0); });
    test("memSetAccess", [&] { return cuMemSetAccess(va, 64 * M, &a, 1); });
    cuMemsetD8(va, 0, 64 * M);
    test("memUnmap", [&] { return cuMemUnmap(va, 64 * M); });
    test("memRelease", [&] { return cuMemRelease(h); });
    test("memAlloc", [&] { return cuMemAlloc(&d, 64 * M); });
    test("memFree", [&] { return cuMemFree(d); });
    test("allocFromPoolAsync cold", [&] { return cuMemAllocFromPoolAsync(&d, 64 * M, pool, w); });
    test("freeAsync", [&] { return cuMemFreeAsync(d, w); });
    test("streamSync idle other", [&] { return cuStreamSynchronize(w); });
    test("poolTrimTo", [&] { return cuMemPoolTrimTo(pool, 0); });
    cuMemAllocFromPoolAsync(&d, 64 * M, pool, w);
    cuStreamSynchronize(w);
    test("freeAsync on the busy stream", [&] { return cuMemFreeAsync(d, s); });
    test("hostAlloc 1 MiB", [&] { return cuMemHostAlloc(&hp, M, 0); });
    test("freeHost", [&] { return cuMemFreeHost(hp); });
    test("hostRegister", [&] { return cuMemHostRegister(reg, M, 0); });
    test("hostUnregister", [&] { return cuMemHostUnregister(reg); });
    test("eventDestroy pending", [&] {
        cuEventRecord(e, s);
        return cuEventDestroy(e);
    });
    test("streamCreate+Destroy", [&] {
        CUstream q;
        cuStreamCreate(&q, 1);
        return cuStreamDestroy(q);
    });
    test("memGetInfo", [&] {
        size_t x, y;
        return cuMemGetInfo(&x, &y);
    });
    test("memsetD8Async other", [&] {
        CUdeviceptr z;
        cuMemAllocFromPoolAsync(&z, M, pool, w);
        int r = cuMemsetD8Async(z, 0, M, w);
        cuMemFreeAsync(z, w);
        return r;
    });
    test("streamDestroy of the busy stream", [&] {
        CUstream q;
        cuStreamCreate(&q, 1);
        launch_wait(q, 1);
        return cuStreamDestroy(q);
    });
    test("primary ctx retain+release", [&] {
        int r = cuDevicePrimaryCtxRetain(&c2, dev);
        cuDevicePrimaryCtxRelease(dev);
        return r;
    });
    free(reg);
    cuMemAddressFree(va, 64 * M);
    cuMemPoolDestroy(pool);
    cuStreamDestroy(s);
    cuStreamDestroy(w);
    cuStreamDestroy(t);
}

// Part 5 of the output.
static int efd;
static std::atomic<u64> ring_head{0};
static std::atomic<int> ring[4096];
static void push(int id) {
    u64 h = ring_head.fetch_add(1);
    ring[h & 4095].store(id + 1);
    u64 one = 1;
    ssize_t r = write(efd, &one, 8);
    (void)r;
}
static double cpu_thread() {
    rusage u;
    getrusage(RUSAGE_THREAD, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e9 + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e3;
}
static double cpu_process() {
    rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e9 + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e3;
}
static void completion() {
    printf("\n## 5 completion: from setting the flag that ends the kernel to the waiting thread's wake-up, us\n");
    efd = eventfd(0, EFD_NONBLOCK);
    CUstream s;
    cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
    const int N = 64;
    std::vector<CUevent> ev(N), evb(N);
    for (int i = 0; i < N; i++) {
        cuEventCreate(&ev[i], CU_EVENT_DISABLE_TIMING);
        cuEventCreate(&evb[i], CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    }
    enum Kind { QUERY, HOSTFUNC, SPIN, NAP, BLOCKSYNC };
    struct Way {
        const char *name;
        Kind k;
        double spin, sleep;
    };
    Way ways[] = {{"spin cuEventQuery here", QUERY, 0, 0}, {"cuLaunchHostFunc -> eventfd", HOSTFUNC, 0, 0},
        {"poller, pure spin", SPIN, 1e12, 0}, {"poller, spin 20, sleep 20", NAP, 20e3, 20e3},
        {"poller, spin 20, sleep 50", NAP, 20e3, 50e3}, {"poller, spin 20, sleep 100", NAP, 20e3, 100e3},
        {"poller, spin 20, sleep 200", NAP, 20e3, 200e3}, {"poller, spin 50, sleep 50", NAP, 50e3, 50e3},
        {"poller, spin 0, sleep doubling 20-200", NAP, 0, -1}, {"thread in blocking eventSync", BLOCKSYNC, 0, 0}};
    const int flight = 1;
    for (auto &w : ways) {
        std::atomic<int> submitted{0};
        std::atomic<bool> stop{false};
        std::atomic<double> pcpu{0};
        std::thread poller;
        if (w.k != QUERY && w.k != HOSTFUNC)
            poller = std::thread([&] {
                cuCtxSetCurrent(ctx);
                prctl(PR_SET_TIMERSLACK, 1);
                int seen = 0;
                while (!stop) {
                    if (submitted <= seen) {
                        nap(20000);
                        if (submitted > seen) {}
                        continue;
                    }
                    int i = seen;
                    if (w.k == BLOCKSYNC) {
                        cuEventSynchronize(evb[i % N]);
                        push(i);
                        seen++;
                        continue;
                    }
                    double t0 = now(), step = 20e3;
                    bool got = false;
                    while (!stop) {
                        if (cuEventQuery(ev[i % N]) != CUDA_ERROR_NOT_READY) {
                            got = true;
                            break;
                        }
                        if (now() - t0 < w.spin) continue;
                        double d = w.sleep < 0 ? step : w.sleep;
                        step = std::min(step * 2, 200e3);
                        nap(d);
                    }
                    if (got) {
                        push(i);
                        seen++;
                    }
                }
                pcpu = cpu_thread();
            });
        std::vector<double> lat;
        int id = 0;
        double wall0 = now(), cpu0 = cpu_process();
        ring_head = 0;
        for (auto &r : ring) r = 0;
        u64 tail = 0;
        int rounds = flight == 1 ? 120 : 12;
        double waited = 0;
        for (int r = 0; r < rounds; r++) {
            *flag = 0;
            std::vector<double> set(flight);
            std::vector<int> ids;
            for (int i = 0; i < flight; i++) {
                launch_wait(s, i + 1);
                if (w.k == HOSTFUNC) cuLaunchHostFunc(s, [](void *p) { push((int)(intptr_t)p); }, (void *)(intptr_t)id);
                else { cuEventRecord(w.k == BLOCKSYNC ? evb[id % N] : ev[id % N], s); }
                id++;
                submitted = id;
            }
            int base = id - flight;
            int got = 0;
            double idle = 1e6 + (rand() % 1000) * 1e3;
            if (w.k == QUERY) spin_for(idle);
            else nap(idle);
            waited += idle;
            std::thread setter;
            if (flight > 1)
                setter = std::thread([&] {
                    for (int i = 0; i < flight; i++) {
                        set[i] = now();
                        *flag = i + 1;
                        spin_for(30000);
                    }
                });
            else {
                set[0] = now();
                *flag = 1;
            }
            double deadline = now() + 1e9;
            while (got < flight && now() < deadline) {
                if (w.k == QUERY) {
                    if (cuEventQuery(ev[(base + got) % N]) == 0) {
                        lat.push_back(now() - set[got]);
                        got++;
                    }
                    continue;
                }
                pollfd pf{efd, POLLIN, 0};
                poll(&pf, 1, 200);
                double t = now();
                u64 c;
                ssize_t x = read(efd, &c, 8);
                (void)x;
                while (tail < ring_head) {
                    int v = ring[tail & 4095].exchange(0);
                    if (!v) break;
                    tail++;
                    lat.push_back(t - set[v - 1 - base]);
                    got++;
                }
            }
            if (setter.joinable()) setter.join();
            if (got < flight) printf("  !! lost %d of %d\n", flight - got, flight);
            cuStreamSynchronize(s);
        }
        double wall = now() - wall0, cpu = cpu_process() - cpu0;
        stop = true;
        if (poller.joinable()) poller.join();
        std::sort(lat.begin(), lat.end());
        if (lat.empty()) continue;
        double sum = 0;
        for (double l : lat) sum += l;
        printf("%2d in flight  %-38s p50 %7.1f  mean %7.1f  p99 %7.1f  max %7.1f | process CPU %.0f %% of wall, its "
               "thread %.0f %%\n",
            flight, w.name, lat[lat.size() / 2] / 1e3, sum / lat.size() / 1e3, lat[lat.size() * 99 / 100] / 1e3,
            lat.back() / 1e3, 100 * cpu / wall, 100 * pcpu / wall);
    }
    cuStreamDestroy(s);
}

// Part 6, 7 of the output.
static void rest() {
    printf("\n## 6, 7\n");
    CUmemoryPool pool;
    CUmemPoolProps pp{};
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = dev;
    CK(cuMemPoolCreate(&pool, &pp));
    CUstream w;
    cuStreamCreate(&w, CU_STREAM_NON_BLOCKING);
    cuuint64_t keep = ~0ull;
    CK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    size_t f[6], t;
    CUdeviceptr d[4];
    auto free_ = [&] {
        cuMemGetInfo(&f[0], &t);
        return f[0] / M;
    };
    size_t a = free_();
    for (auto &x : d) cuMemAllocFromPoolAsync(&x, 256 * M, pool, w);
    cuStreamSynchronize(w);
    size_t b = free_();
    for (auto x : d) cuMemFreeAsync(x, w);
    cuStreamSynchronize(w);
    size_t c = free_();
    cuMemPoolTrimTo(pool, 512 * M);
    size_t e = free_();
    cuMemPoolTrimTo(pool, 0);
    size_t g = free_();
    printf("free MiB: start %zu, 4x256 allocated %zu, freed %zu, trimmed to 512 %zu, to 0 %zu (of %zu)\n", a, b, c, e,
        g, t / M);
    cuMemAllocFromPoolAsync(&d[0], 256 * M, pool, w);
    cuStreamSynchronize(w);
    *flag = 0;
    launch_wait(w, 1);
    cuMemFreeAsync(d[0], w);
    cuuint64_t rs, us;
    cuMemPoolTrimTo(pool, 0);
    cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &rs);
    cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &us);
    printf("freed behind a running kernel, trimmed: reserved %zu, used %zu MiB; ", (size_t)rs / M, (size_t)us / M);
    *flag = 1;
    cuStreamSynchronize(w);
    cuMemPoolTrimTo(pool, 0);
    cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &rs);
    printf("after it: %zu\n", (size_t)rs / M);
    cuMemPoolDestroy(pool);
    cuMemPoolCreate(&pool, &pp);
    printf("small segments from the pool reserve: ");
    for (size_t n : {2, 20, 33, 64, 100}) {
        cuMemAllocFromPoolAsync(&d[0], n * M, pool, w);
        cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &rs);
        printf("%zu->%zu ", n, (size_t)rs / M);
        cuMemFreeAsync(d[0], w);
        cuStreamSynchronize(w);
        cuMemPoolTrimTo(pool, 0);
    }
    printf("MiB\n");
    struct {
        CUdevice_attribute a;
        const char *n;
    } at[] = {{CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "vmm"},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "pools"},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, "rdma with vmm"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "fd handles"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, "fabric handles"},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "uva"},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, "host ptr"},
        {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "host numa vmm"},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, "copy engines"}};
    for (auto &x : at) {
        int v = -1;
        cuDeviceGetAttribute(&v, x.a, dev);
        printf("%s %d; ", x.n, v);
    }
    printf("\n");
    CUasyncCallbackHandle cb = nullptr;
    int r = cuDeviceRegisterAsyncNotification(
        dev,
        [](CUasyncNotificationInfo *i, void *, CUasyncCallbackHandle) {
            fprintf(stderr, "async notification type %d over budget %llu\n", (int)i->type,
                (u64)i->info.overBudget.bytesOverBudget);
        },
        nullptr, &cb);
    printf("cuDeviceRegisterAsyncNotification -> %d %s", r, name_of((CUresult)r).c_str());
    if (!r) printf(", unregister %d", cuDeviceUnregisterAsyncNotification(dev, cb));
    printf("\n");
    for (const char *n : {"cuCtxRecordEvent", "cuCtxWaitEvent", "cuMemBatchDecompressAsync", "cuStreamGetDevice",
             "cuMemcpyBatchAsync", "cuEventElapsedTime_v2", "cuStreamWriteValue32"}) {
        void *p = nullptr;
        CUdriverProcAddressQueryResult q;
        int z = cuGetProcAddress(n, &p, 13000, 0, &q);
        int p2 = cuGetProcAddress(n, &p, 12040, 0, &q);
        printf("%s 13.0:%d 12.4:%d; ", n, z, p2);
    }
    printf("\n");
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CK(cuInit(0));
    CK(cuDeviceGet(&dev, 0));
    double t = now();
    CK(cuDevicePrimaryCtxRetain(&ctx, dev));
    CK(cuCtxSetCurrent(ctx));
    int v;
    cuDriverGetVersion(&v);
    char n[99];
    cuDeviceGetName(n, 99, dev);
    void *hp;
    CK(cuMemHostAlloc(&hp, 4096, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE));
    flag = (volatile int *)hp;
    *flag = 0;
    CK(cuMemHostGetDevicePointer(&dflag, hp, 0));
    cudaGetFuncBySymbol((cudaFunction_t *)&f_empty, (const void *)k_empty);
    cudaGetFuncBySymbol((cudaFunction_t *)&f_wait, (const void *)k_wait);
    cudaGetFuncBySymbol((cudaFunction_t *)&f_ns, (const void *)k_ns);
    *flag = 1;
    CK((CUresult)launch_empty(nullptr));
    CK((CUresult)launch_wait(nullptr, 1));
    CK((CUresult)launch_ns(nullptr, 1000));
    CK(cuCtxSynchronize());
    std::string only = argc > 1 ? argv[1] : "";
    printf("# %s, driver %d, context in %.0f ms\n", n, v, (now() - t) / 1e6);
    struct {
        const char *n;
        void (*f)();
    } parts[] = {{"calls", calls}, {"order", order}, {"vmm", vmm}, {"contention", contention},
        {"synchronizes", synchronizes}, {"completion", completion}, {"rest", rest}};
    for (auto &p : parts)
        if (only.empty() || only == p.n) {
            double q = now();
            p.f();
            CK(cuCtxSynchronize());
            printf("   [%s took %.1f s]\n", p.n, (now() - q) / 1e9);
        }
    return 0;
}
