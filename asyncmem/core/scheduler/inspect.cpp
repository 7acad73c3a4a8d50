// Effects handed out, figures, and the invariants.
#include <algorithm>
#include <unordered_map>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

bool Scheduler::next(Effect& effect) {
    std::lock_guard lock(lock_);
    if (effects_.empty()) return false;
    effect = std::move(effects_.front());
    effects_.pop_front();
    return true;
}

void Scheduler::put_back(Effect effect) {
    std::lock_guard lock(lock_);
    effects_.push_front(std::move(effect));
}

Gauges Scheduler::gauges() const {
    std::lock_guard lock(lock_);
    Gauges found{.waiting = waiting_,
                 .waiting_bytes = waiting_bytes_,
                 .growing = growing_.count(),
                 .growing_bytes = growing_.bytes(),
                 .coming = source_->coming(),
                 .leaving = source_->leaving(),
                 .overtaken = root_->overtaken,
                 .under_way = jobs_.size(),
                 .grows = source_->grows,
                 .trims = source_->trims,
                 .foreign = foreign_,
                 .progress = progress_,
                 .moved = source_->moved(),
                 .waited = source_->waited(),
                 .pressure = pressure_,
                 .means = {}};
    std::ranges::copy(means_, found.means);
    return found;
}

std::vector<RequestId> Scheduler::queued() const {
    std::lock_guard lock(lock_);
    std::vector<std::pair<uint64_t, RequestId>> found;
    requests_.each([&](Request& request) {
        if (request.queued() && request.sequence) found.emplace_back(request.sequence, request.id);
    });
    std::sort(found.begin(), found.end());
    std::vector<RequestId> ids;
    for (auto& one : found) ids.push_back(one.second);
    return ids;
}

std::string Scheduler::check() const {
    std::lock_guard lock(lock_);
    uint64_t waiting = 0, bytes = 0, growing = 0, promised = 0;
    std::string wrong;
    std::unordered_map<const Share*, size_t> requests, parts;
    requests_.each([&](Request& request) {
        ++requests[request.share];
        if (!request.sequence || !request.queued()) return;
        if (request.state == State::Waiting) {
            ++waiting;
            bytes += request.total;
        } else {
            ++growing;
            promised += request.total;
        }
        if (request.promised != (request.state == State::Growing)) wrong = "a promise without growth, or growth without one";
    });
    if (waiting != waiting_ || bytes != waiting_bytes_) return "the waiting requests are miscounted";
    if (growing != growing_.count()) return "the growing requests are miscounted";
    size_t queued = 0;
    for (auto& share : by_account_)
        if (share) ++parts[share->part_of];
    for (auto& share : by_account_) {
        if (!share) continue;
        if (share->requests != requests[share.get()]) return "the requests of a share are miscounted";
        if (share->parts != parts[share.get()]) return "the parts of a share are miscounted";
        if (!share->queue.sound()) return "a queue is out of order";
        queued += share->queue.count();
        if (share->up && (share->listed != 0) != (!share->queue.empty() || !share->inside.empty()))
            return "a share with requests is not listed, or one without is";
    }
    if (queued != waiting_) return "the queues hold other requests than those that wait";
    if (!growing_.sound()) return "the queue of growing requests is out of order";
    if (heap_.account(0).promised != promised) return "the pool has promised other bytes than its growing requests ask for";
    uint64_t held = 0;
    for (const Hold& hold : holds_) held += hold.block != 0;
    if (held != held_) return "the holds are miscounted";
    return wrong;
}

}  // namespace asyncmem::scheduler
