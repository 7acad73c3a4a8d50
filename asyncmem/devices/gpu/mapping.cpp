#include "mapping.hpp"

namespace asyncmem::gpu {
namespace {

constexpr int pinned = 1;
constexpr int on_device = 1;
constexpr int no_access = 0;
constexpr int read_and_write = 3;

} // namespace

Properties memory_of(const Context &context) { return {pinned, 0, {on_device, context.device()}, nullptr, {}}; }

std::vector<Access> access_of(const std::vector<int> &devices, bool allowed) {
    std::vector<Access> accesses;
    for (int device : devices)
        accesses.push_back({{on_device, device}, allowed ? read_and_write : no_access});
    return accesses;
}

Outcome Mapping::called(const char *call, Code code) {
    context_.call_count.fetch_add(1, std::memory_order_relaxed);
    return {code, call};
}

Outcome Mapping::map(const std::vector<std::uint64_t> &sizes, const std::vector<int> &devices, std::uint64_t step) {
    pieces_.reserve(sizes.size());
    for (std::uint64_t nbytes : sizes) {
        Outcome outcome = add(nbytes);
        if (outcome.code != success)
            return outcome;
    }
    return allow(devices, true, step);
}

Outcome Mapping::add(std::uint64_t nbytes) {
    if (gone())
        return {deinitialized, "cuMemCreate"};
    const Table &driver = context_.driver;
    const Properties wish = memory_of(context_);
    Piece piece{end_, nbytes, 0, false};
    Outcome outcome = called("cuMemCreate", driver.cuMemCreate(&piece.handle, nbytes, &wish, 0));
    if (outcome.code != success)
        return outcome;
    outcome = called("cuMemMap", driver.cuMemMap(end_, nbytes, 0, piece.handle, 0));
    piece.mapped = outcome.code == success;
    pieces_.push_back(piece);
    end_ += nbytes;
    return outcome;
}

Outcome Mapping::allow(const std::vector<int> &devices, bool allowed, std::uint64_t step) {
    const std::vector<Access> accesses = access_of(devices, allowed);
    Outcome outcome;
    for (std::size_t at = 0; at < pieces_.size() && outcome.code == success;) {
        if (gone())
            return {deinitialized, "cuMemSetAccess"};
        const std::uint64_t begin = pieces_[at].address;
        std::uint64_t nbytes = pieces_[at++].nbytes;
        while (at < pieces_.size() && nbytes + pieces_[at].nbytes <= step)
            nbytes += pieces_[at++].nbytes;
        outcome = called("cuMemSetAccess",
                         context_.driver.cuMemSetAccess(begin, nbytes, accesses.data(), accesses.size()));
    }
    return outcome;
}

Outcome Mapping::clear() {
    Outcome outcome;
    while (!pieces_.empty()) {
        if (gone())
            return {deinitialized, "cuMemUnmap"};
        Piece &piece = pieces_.back();
        if (piece.mapped) {
            outcome = called("cuMemUnmap", context_.driver.cuMemUnmap(piece.address, piece.nbytes));
            piece.mapped = outcome.code != success;
        }
        if (outcome.code == success)
            outcome = called("cuMemRelease", context_.driver.cuMemRelease(piece.handle));
        if (outcome.code != success)
            return outcome;
        pieces_.pop_back();
    }
    return outcome;
}

} // namespace asyncmem::gpu
