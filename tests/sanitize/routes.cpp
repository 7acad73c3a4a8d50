// Native threads that allocate by routes of their own, and free each other's blocks, while one thread serves them.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "binding/routes.hpp"

using namespace asyncmem;

namespace {

constexpr uint64_t segment = uint64_t{1} << 26;

void demand(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what.c_str());
    std::abort();
}

// What the binding does where a library's block was freed: a fence behind all streams, which is reached at once here.
void serve(Heap& heap, uint32_t everywhere, const Route* last) {
    for (;;) {
        uint32_t flags = 0;
        int owes = 0;
        Route* route = Routes::all().wait_for_route(flags, owes);
        if (owes) heap.mark_done(everywhere, heap.close_epoch(everywhere));
        heap.expect_news(-1);
        Routes::all().drop(*route);
        if (route == last) return;
    }
}

struct Shared {
    std::mutex lock{};
    std::vector<void*> blocks{};

    void* exchange(void* block) {
        std::lock_guard guard(lock);
        if (block) blocks.push_back(block);
        if (blocks.size() < 8) return nullptr;
        std::swap(blocks.back(), blocks[blocks.size() / 2]);
        void* other = blocks.back();
        blocks.pop_back();
        return other;
    }
};

void work(Route& route, Shared& shared, int steps, unsigned seed) {
    std::mt19937 draw(seed);
    Routes::here() = &route;
    std::vector<void*> mine;
    for (int i = 0; i < steps; ++i) {
        if (draw() % 2 || mine.empty()) {
            void* block = route_allocate(512 << draw() % 12, 0, nullptr);
            if (block) mine.push_back(block);
        } else {
            void* block = mine.back();
            mine.pop_back();
            if (draw() % 4 == 0) route_name_stream(block, nullptr);
            if (draw() % 2) block = shared.exchange(block);
            route_release(block, 0, 0, nullptr);
        }
        if (draw() % 64 == 0) Routes::all().counts(route);
        if (draw() % 256 == 0) set_open(&route, draw() % 4);
    }
    for (void* block : mine) route_release(block, 0, 0, nullptr);
    Routes::here() = nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 4;
    const int steps = argc > 2 ? std::atoi(argv[2]) : 20000;
    Heap heap(512, Tuning{});
    heap.set_guarded(false);
    const uint32_t everywhere = heap.add_stream();
    for (uint32_t i = 0; i < 4; ++i) heap.add_segment((i + 1) * 2 * segment, segment, i % 2, 0);
    Routes::all().missed = [](Route*, size_t, uint64_t) -> void* { return nullptr; };
    std::vector<Route*> routes;
    for (int i = 0; i <= threads; ++i) {
        routes.push_back(new_route(&heap, nullptr, nullptr, 0, 0, -1, everywhere, i % 2 == 1));
        know(routes.back(), 0, 0);
        Routes::all().use(*routes.back());
        set_open(routes.back(), true);
    }
    Shared shared;
    std::thread server(serve, std::ref(heap), everywhere, routes[0]);
    std::vector<std::thread> crew;
    for (int i = 1; i <= threads; ++i)
        crew.emplace_back([&, i] { work(*routes[i], shared, steps, static_cast<unsigned>(i)); });
    for (std::thread& one : crew) one.join();
    for (void* block : shared.blocks) route_release(block, 0, 0, nullptr);
    Routes::here() = routes[0];
    route_release(route_allocate(512, 0, nullptr), 0, 0, nullptr);
    server.join();
    for (Route* route : routes) {
        const RouteCounts counts = Routes::all().counts(*route);
        demand(counts.live == 0 && counts.blocks == 0 && counts.taken == counts.freed, "a route counts what is freed");
        demand(counts.blocks_taken > 0, "a route has served nothing");
        delete route;
    }
    heap.mark_done(0, heap.close_epoch(0));
    heap.mark_done(everywhere, heap.close_epoch(everywhere));
    heap.flush(-1);
    heap.merge();
    demand(heap.check().empty(), heap.check());
    demand(heap.live() == 0, "bytes are live that nobody holds");
    std::printf("%d threads x %d steps by routes: sound\n", threads, steps);
}
