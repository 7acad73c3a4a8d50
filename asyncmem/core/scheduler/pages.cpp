// Pages: ranges of addresses that stay, below which memory comes, moves and goes.
//
// Addresses are chosen as if memory were behind all of them, so a pool never needs more for having taken pages back. That
// holds as long as nothing else depends on which pages are mapped: where only pages are lacking, no cache is emptied, no
// neighbours are joined and, with several streams, no fence is looked at. `Scheduler::beat` does that by the clock.
#include <algorithm>

#include "source.hpp"

namespace asyncmem::scheduler {

namespace {

constexpr double grace = 0.02;               // seconds that moves may take before they count
constexpr uint64_t coarse_parts = 12;        // a handle is no larger than such a part of a request; they cost by number
constexpr uint64_t limit_parts = 512;        // nor, below a limit of the user's, than such a part of that
constexpr uint64_t stock = 256;              // one part in so many is mapped ahead of need, where all the rest is live
constexpr uint64_t stock_parts = 4;
constexpr uint64_t far_off = 8;              // as long as one part in so many may still be added
constexpr double rest = 0.25;                // seconds without a try after memory could not go back

uint64_t fresh_of(const Plan& plan) {
    uint64_t sum = 0;
    for (const Range& range : plan.fresh) sum += range.nbytes;
    return sum;
}

class PageSource final : public Source {
public:
    using Source::Source;

    void shift(double seconds) override {
        Source::shift(seconds);
        rest_until_ += seconds;
    }
    bool may_hold(uint64_t) const override { return true; }  // memory comes for whatever has addresses
    bool should_flush(const Request& request) override { return !has_addresses(request); }
    bool should_tidy(const Request& request, bool first) override {
        return (first || slack() < 0) && !has_addresses(request);
    }
    bool can_grow(const Request& request) const override {
        return available() + heap_.reserved() - heap_.live() >= request.total;
    }
    std::vector<uint32_t> unfenced() const override { return heap_.unfenced(); }

    Step patience(const Request& request, double now, bool looked) override {
        if (!may_be_patient(request, now)) return {};
        if (!looked) return look();
        Found found = plan_for(request, true, now);
        if (!found.change) return wait_patiently(request, found.later, now);
        let_go(*found.change);
        return {};
    }

    Step grow(const Request& request, double now, bool looked) override {
        bool may_move = policy_.take_back && heap_.reserved() - heap_.live() >= policy_.page;
        if (!looked && !several_streams() && may_move) return look();
        Found found = plan_for(request, false, now);
        if (!found.change) {
            // There is a limit in the way, so that what is done counts.
            if (!looked) return look();
            return {};
        }
        if (found.change->plans.empty()) return {};
        if (found.change->fresh()) add_stock(*found.change, request);
        return carried_out(std::move(*found.change), now);
    }

    Step grow_part(const Request&) override { return {}; }  // what is planned is never more than what is lacking

    Step wait(const Request& request, double now) override {
        if (request.terms.calls && request.terms.on_loop) return {};
        double most = request.terms.calls ? request.terms.deadline - now : never;
        return wait_for(uses_for(request, now), most);
    }

    Step make_room(const Request& request, double now) override {
        Idle idle = heap_.idle_memory();
        if (!idle.nbytes || available() + idle.nbytes < request.total) return {};
        if (request.terms.calls && !idle.uses.empty()) {
            if (request.terms.on_loop) return {};
            return wait_for(std::move(idle.uses), request.terms.deadline - now);
        }
        return trim(no_limit, 0, now);
    }

    Step grow_ahead(double now) override {
        uint64_t reserved = heap_.reserved() + coming_;
        if (policy_.ready <= reserved) return {};
        Found found = plan_pieces({policy_.ready - reserved}, 0, false, available(), 0, now);
        return found.change && !found.change->plans.empty() ? carried_out(std::move(*found.change), now) : Step{};
    }

    Step trim(uint64_t wanted, uint64_t keep, double now) override {
        if (wanted != no_limit && now < rest_until_) return {};  // it would fail again, and nobody asks for it by name
        Idle idle = heap_.idle_memory();
        uint64_t kept = keep + leaving_, reserved = heap_.reserved();
        uint64_t nbytes = std::min({idle.nbytes, reserved - std::min(reserved, kept), wanted});
        if (!nbytes) return {};
        leaving_ += nbytes;
        Step step = wait_for(std::move(idle.uses), never);
        step.job.reclaims = true;
        step.job.nbytes = nbytes;
        if (!step) {
            step = reclaim(step.job, now);
            if (!step) leaving_ -= nbytes;
        }
        return step;
    }

    Step reclaim(Job& job, double now) override {
        Plan plan = heap_.reclaim(job.nbytes);
        if (!plan.found) return {};
        Change change;
        change.decided = now;
        change.plans.push_back(std::move(plan));
        Step step = carried_out(std::move(change), now);
        step.job.reclaims = true;
        step.job.nbytes = job.nbytes;
        return step;
    }

    void waited(const Job& job, double now) override {
        if (job.reclaims) {
            leaving_ -= job.nbytes;
            rest_until_ = now + rest;
        }
        Source::waited(job, now);
    }

    void remapped(Job& job, size_t unmapped, size_t mapped, bool out_of_memory, double now, double seconds) override {
        std::vector<Effect::Span> out = leaves(job.change), into = comes(job.change);
        if (unmapped > out.size() || mapped > into.size()) throw std::invalid_argument("more was moved than was to move");
        for (size_t i = 0; i < unmapped; ++i) heap_.set_bare(out[i].segment, out[i].address, out[i].nbytes);
        for (size_t i = 0; i < mapped; ++i) heap_.set_mapped(into[i].segment, into[i].address, into[i].nbytes);
        coming_ -= job.change.fresh();
        if (job.reclaims) {
            leaving_ -= job.nbytes;
            trims += unmapped > 0;
            refused_ = no_limit;
            if (unmapped < out.size()) rest_until_ = now + rest;
        } else {
            if (out_of_memory) refused_ = job.change.fresh();
            grows += mapped > 0;
            if (!out.empty()) lifetime_.moved += seconds;
        }
        note_peak();
        let_go(job.change);
    }

protected:
    uint64_t free() const override { return heap_.spread() - heap_.live(); }
    uint64_t reserved_or_leaving() const override { return heap_.reserved(); }

private:
    struct Found {
        std::optional<Change> change;
        Entries waits;             // without a change: what makes one possible once it is done,
        std::vector<Idle> later;  // and its parts
    };

    uint64_t available() const {
        uint64_t most = left();
        return refuses() ? std::min(most, refused_ - std::min(refused_, policy_.page)) : most;
    }

    bool may_be_foreign(const Request& request) const {
        return several_streams() && !request.terms.captured && !keeps_apart(request);
    }
    Foreign reach(bool foreign) const {
        return !foreign ? Foreign::Never : policy_.late_fences ? Foreign::Any : Foreign::Recorded;
    }
    static Ask ask_for(uint64_t nbytes, uint32_t stream, int32_t arena = -1) {
        return Ask{.nbytes = nbytes, .stream = stream, .arena = arena, .again = true};
    }

    bool has_addresses(const Request& request) {
        Foreign foreign = reach(may_be_foreign(request));
        if (!request.batch()) return heap_.has_addresses(ask_for(request.ask.nbytes, request.ask.stream), foreign);
        return std::all_of(request.pieces.begin(), request.pieces.end(), [&](uint64_t nbytes) {
            return heap_.has_addresses(ask_for(nbytes, request.ask.stream), foreign);
        });
    }

    static Step look_at(std::vector<uint32_t> streams) { return Step{.kind = Step::Kind::Look, .streams = std::move(streams)}; }
    Step look() const { return look_at(heap_.unfenced()); }

    static Step wait_for(Entries uses, double seconds) {
        Step step;
        if (uses.empty()) return step;
        step.kind = Step::Kind::Effect;
        step.effect.kind = step.job.kind = Effect::Kind::Wait;
        step.effect.uses = std::move(uses);
        step.effect.seconds = seconds;
        return step;
    }

    Entries uses_for(const Request& request, double now) {
        Found found = plan_for(request, false, now);
        if (found.change) let_go(*found.change);
        return std::move(found.waits);
    }

    // Moves save memory and cost time. A program that makes them go round and round is better off with more memory.
    Found plan_for(const Request& request, bool modest, double now) {
        uint64_t left = available(), reserved = heap_.reserved() + coming_;
        uint64_t room = std::min(left, peak_ - std::min(peak_, reserved));
        if (!lifetime_.may_move(now, policy_.dear, grace) || !policy_.take_back) room = left;
        uint64_t most = modest ? 0 : left - room;
        bool foreign = may_be_foreign(request);
        std::vector<uint64_t> sizes = request.batch() ? request.pieces : std::vector<uint64_t>{request.ask.nbytes};
        Found found = plan_pieces(sizes, request.ask.stream, foreign, room, most, now);
        if (foreign && found.change && found.change->plans.empty())
            // All that is lacking is a way to the memory: it is another stream's, and cannot be waited for.
            found = plan_pieces(sizes, request.ask.stream, false, room, most, now);
        return found;
    }

    // Addresses do not depend on where memory is, so pieces are taken one after the other as they will be taken in the
    // end, and planned for where memory is lacking. What was taken goes back as it was.
    Found plan_pieces(std::vector<uint64_t> sizes, uint32_t stream, bool foreign, uint64_t room, uint64_t most, double now) {
        std::sort(sizes.begin(), sizes.end(), std::greater<>());
        std::vector<std::pair<BlockId, Entries>> taken;
        Found found;
        found.change.emplace();
        found.change->decided = now;
        for (uint64_t nbytes : sizes) {
            if (sizes.size() > 1 && take(nbytes, stream, foreign, taken)) continue;
            Plan plan = heap_.plan(ask_for(nbytes, stream), room, most, reach(foreign), parts_of(nbytes));
            if (!plan.found) {
                let_go(*found.change);
                found.change.reset();
                found.waits = std::move(plan.waits);
                found.later = std::move(plan.later);
                break;
            }
            uint64_t fresh = fresh_of(plan), back = 0, planned = plan.nbytes;
            for (const Move& move : plan.moves) back += move.to ? 0 : move.nbytes;
            if (!plan.moves.empty() || fresh) {
                found.change->plans.push_back(std::move(plan));
            } else if (planned) {
                heap_.let_go(plan.segment, plan.address, planned);
            }
            if (planned > ((nbytes + 511) & ~uint64_t{511})) break;  // the rest of its last page is for the next piece
            room += back;
            most -= std::min(most, fresh - std::min(fresh, room));
            room -= std::min(room, fresh);
        }
        while (!taken.empty()) {
            heap_.put_back(taken.back().first, taken.back().second);
            taken.pop_back();
        }
        return found;
    }

    bool take(uint64_t nbytes, uint32_t stream, bool foreign, std::vector<std::pair<BlockId, Entries>>& taken) {
        Outcome outcome;
        Entries owed;
        BlockId block = heap_.take(ask_for(nbytes, stream), outcome);
        if (!block && foreign) block = heap_.take_foreign(ask_for(nbytes, stream), policy_.late_fences, owed, outcome);
        if (block) taken.emplace_back(block, std::move(owed));
        return block;
    }

    uint64_t parts_of(uint64_t nbytes) const {
        if (!policy_.limited) return coarse_parts;
        return std::max(usual_parts, nbytes / (policy_.limit / limit_parts + 1));
    }

    // Where next to all is live, new memory is asked for again soon. Where some is free, it is what serves then.
    void add_stock(Change& change, const Request& request) {
        uint64_t page = policy_.page, fresh = change.fresh();
        uint64_t reserved = heap_.reserved() + coming_ + fresh, used = heap_.live() + request.total;
        uint64_t wanted = std::min(reserved / stock, policy_.segment_size) / page * page + used;
        if (wanted <= reserved) return;
        uint64_t left = available();
        if (left - std::min(left, fresh) < reserved / far_off) return;
        uint64_t nbytes = (wanted - reserved + page - 1) / page * page;
        Plan plan = heap_.plan(ask_for(nbytes, request.ask.stream, 1), nbytes, 0, Foreign::Never, stock_parts);
        if (plan.found) change.stock = std::move(plan);
    }

    Step carried_out(Change change, double now) {
        coming_ += change.fresh();
        Step step{.kind = Step::Kind::Effect};
        step.effect.kind = step.job.kind = Effect::Kind::Remap;
        step.effect.out = leaves(change);
        step.effect.into = comes(change);
        for (const Plan& plan : change.plans)
            for (const Move& move : plan.moves) step.effect.moved += move.to != 0;
        step.effect.ahead = change.stock ? change.stock->fresh.size() : 0;
        step.effect.nbytes = change.more();
        step.effect.need = step.effect.nbytes - std::min(step.effect.nbytes, change.ahead());
        step.job.change = std::move(change);
        step.job.started = now;
        return step;
    }

    // What is unmapped, by address, so that neighbours go in one call.
    static std::vector<Effect::Span> leaves(const Change& change) {
        std::vector<Effect::Span> out;
        for (const Plan& plan : change.plans)
            for (const Move& move : plan.moves) out.push_back({move.segment, move.address, move.nbytes});
        std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.address < b.address; });
        return out;
    }

    // What is mapped: first where memory only moves to, so that it gets what was unmapped; last what is ahead of need.
    static std::vector<Effect::Span> comes(const Change& change) {
        std::vector<Effect::Span> into;
        for (const Plan& plan : change.plans)
            for (const Move& move : plan.moves)
                if (move.to) into.push_back({plan.segment, move.to, move.nbytes});
        auto add = [&](const Plan& plan) {
            for (const Range& range : plan.fresh) into.push_back({plan.segment, range.address, range.nbytes});
        };
        for (const Plan& plan : change.plans) add(plan);
        if (change.stock) add(*change.stock);
        return into;
    }

    // Let the heap have it all again, joined with what it was cut from.
    void let_go(const Change& change) {
        auto one = [&](const Plan& plan) {
            for (const Move& move : plan.moves) heap_.let_go(move.segment, move.address, move.nbytes);
            if (plan.nbytes) heap_.let_go(plan.segment, plan.address, plan.nbytes);
        };
        for (const Plan& plan : change.plans) one(plan);
        if (change.stock) one(*change.stock);
    }

    double rest_until_ = -never;
};

}  // namespace

uint64_t Change::fresh() const {
    uint64_t sum = ahead();
    for (const Plan& plan : plans) sum += fresh_of(plan);
    return sum;
}

uint64_t Change::more() const {
    uint64_t back = 0;
    for (const Plan& plan : plans)
        for (const Move& move : plan.moves) back += move.to ? 0 : move.nbytes;
    return fresh() - std::min(fresh(), back);
}

uint64_t Change::ahead() const { return stock ? fresh_of(*stock) : 0; }

std::unique_ptr<Source> make_pages(Heap& heap, const Policy& policy, double now) {
    return std::make_unique<PageSource>(heap, policy, now);
}

}  // namespace asyncmem::scheduler
