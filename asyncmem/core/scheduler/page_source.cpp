// Pages: ranges of addresses that stay, below which memory comes, moves and goes.
//
// A request that finds no memory gets addresses where little is missing. What is idle is mapped there as well: at once, even
// while the request's own stream uses it, whose work is in order. What it leaves is unmapped when the device is done there.
// Where only pages are lacking, no cache is emptied, no neighbours are joined and, with several streams, no fence is looked
// at: `Scheduler::beat` does that by the clock.
#include <algorithm>

#include "source.hpp"

namespace asyncmem::scheduler {

namespace {

constexpr double grace = 0.02, young = 0.1;  // seconds that moves may take besides, but of a young pool a tenth
constexpr double usual_move = 5e-5;          // seconds that a handle takes to move, as long as none has moved
constexpr double most_moved = 2;             // times what moves may take, after which none is worth it
constexpr uint64_t most_parts = 20, least_parts = 4;  // of a request, each a handle: as few as those need that are no
constexpr uint64_t fine_parts = 300;         // larger than this part of all that is reserved
constexpr double affordable = 0.8;           // times `dear` is what all calls may take before they are
constexpr uint64_t limit_parts = 512;        // below a limit of the user's it is at most this part of the limit, too
constexpr double stock = 256;                // one part in so many is mapped ahead of need, where all the rest is live
constexpr double most_stock = 32;            // and up to that, where calls are dear: so many times more than they may be
constexpr double hasty = 1.5;
constexpr double busy = 5;                   // what is free does not serve where calls take so many times more
constexpr uint64_t far_off = 8;              // as long as one part in so many may still be added
constexpr double spare_time = 0.6;           // times `dear`: as long as calls took less, large handles are split
constexpr uint64_t most_split = 16;          // into so many at once, for that memory can serve nobody meanwhile
constexpr uint64_t much_free = 32;           // if one part in so many was free when more came, and
constexpr uint32_t most_beats = 1000;        // in the next so many beats

class PageSource final : public Source {
public:
    using Source::Source;

    bool may_hold(uint64_t) const override { return true; }  // memory comes for whatever has addresses
    bool should_flush(const Request& request) override { return !has_addresses(request); }
    bool should_tidy(const Request& request, bool first) override {
        return (first || slack() < 0) && !has_addresses(request);
    }
    bool can_grow(const Request& request) const override {
        return available() + heap_.reserved() - heap_.live() >= request.total;
    }
    // Until so much is there as a first segment has: with a few pages, each request would have to ask.
    bool grows_apart(const Request& request) const override {
        bool few = heap_.reserved() + coming_ < policy_.segment_size;
        return few && request.terms.effort == Effort::All && keeps_apart(request);
    }
    std::vector<uint32_t> unfenced() const override { return heap_.unfenced(); }

    Decision patience(const Request& request, double now, bool looked) override {
        if (!may_be_patient(request, now)) return {};
        if (!looked) return look();
        Found found = plan_for(request, true, now);
        if (!found.change) return wait_patiently(request, found.later, now);
        let_go(*found.change);
        return {};
    }

    Decision grow(const Request& request, double now, bool looked) override {
        bool may_move = policy_.take_back && heap_.reserved() - heap_.live() >= policy_.page;
        if (!looked && !several_streams() && may_move) {
            if (is_behind()) return look();
            Source::looked(now);
        }
        Found found = plan_for(request, false, now, stock_for(request, now));
        if (!found.change) {
            // There is a limit in the way, so that what is done counts.
            if (!looked) return look();
            return {};
        }
        if (found.change->plans.empty()) return {};
        grown_for_ = request.total;
        uint64_t free = heap_.reserved() - heap_.live();
        uint64_t more = found.change->more();
        if (more && free >= (heap_.reserved() + more) / much_free) beats_to_split_ = most_beats;
        return carried_out(std::move(*found.change));
    }

    Decision wait(const Request& request, double now) override {
        if (request.terms.calls && request.terms.on_loop) return {};
        double most = request.terms.calls ? request.terms.deadline - now : never;
        Found found = plan_for(request, false, now);
        if (found.change) let_go(*found.change);
        return wait_for(std::move(found.waits), most);
    }

    Decision make_room(const Request& request, double now) override {
        Piece idle = heap_.idle_memory();
        if (!idle.nbytes || available() + idle.nbytes < request.total) return {};
        if (request.terms.calls && !idle.uses.empty()) {
            if (request.terms.on_loop) return {};
            return wait_for(std::move(idle.uses), request.terms.deadline - now);
        }
        return trim(no_limit, 0, now);
    }

    Decision grow_ahead(double now) override {
        uint64_t reserved = heap_.reserved() + coming_;
        if (policy_.ready <= reserved) return {};
        Found found = plan_pieces({policy_.ready - reserved}, 0, false, available(), 0, now, false);
        return found.change && !found.change->plans.empty() ? carried_out(std::move(*found.change)) : Decision{};
    }

    Decision trim(uint64_t wanted, uint64_t keep, double now, bool asked = false) override {
        if (wanted != no_limit && now < pauses_until_) return {};  // it would fail again, and no request asks for it by name
        Piece idle = heap_.idle_memory();
        uint64_t kept = keep + leaving_, reserved = heap_.reserved();
        uint64_t nbytes = std::min({idle.nbytes, reserved - std::min(reserved, kept), wanted});
        if (asked)
            for (const Vacated& one : vacated_)
                for (const Entry& use : one.uses)
                    if (!is_done(use)) include(idle.uses, use);
        if (!nbytes && (!asked || vacated_.empty())) return {};
        Decision next = wait_for(std::move(idle.uses), never);
        if (!next) next = reclaim(nbytes);
        if (!next) return {};
        leaving_ += nbytes;
        next->reclaims = true;
        next->leaving = nbytes;
        return next;
    }

    Decision reclaim(uint64_t nbytes) override {
        Change change;
        if (Plan plan = heap_.reclaim(nbytes); plan.found) change.plans.push_back(std::move(plan));
        Decision job = carried_out(std::move(change));
        if (!job) return {};
        job->reclaims = true;
        job->leaving = nbytes;
        return job;
    }

    Decision unmap_vacated(double now) override { return now < pauses_until_ ? Decision{} : carried_out({}); }
    bool has_vacated() const override { return !vacated_.empty(); }

    // What came in large handles, when calls were dear, can move in small ones later, where free memory did not serve.
    Decision split(double now) override {
        bool may = policy_.take_back && !policy_.limited && !refuses() && now >= pauses_until_ && beats_to_split_;
        if (!may || called_ > spare_time * policy_.dear * (now - lifetime_.began)) return {};
        --beats_to_split_;
        Change change;
        if (Plan plan = heap_.plan_split(heap_.reserved() / fine_parts, most_split); plan.found) change.plans.push_back(std::move(plan));
        Decision job = carried_out(std::move(change));
        if (job) job->splits = true;
        return job;
    }

    uint64_t leaving() const override {
        uint64_t nbytes = leaving_;
        for (const Vacated& one : vacated_) nbytes += one.leaving ? one.span.nbytes : 0;
        return nbytes;
    }

    void waited(const Job& job, double now) override {
        if (job.reclaims) {
            leaving_ -= job.leaving;
            pauses_until_ = now + refused_pause;
        }
        Source::waited(job, now);
    }

    void remapped(Job& job, size_t moved, size_t unmapped, size_t mapped, bool out_of_memory, double now, double seconds) override {
        const Effect& effect = job.effect;
        if (moved > effect.moves.size() || unmapped > effect.out.size() || mapped > effect.into.size())
            refuse_argument("more was moved than was to move");
        bool moves = moved;
        for (Plan& plan : job.change.plans)
            std::erase_if(plan.moves, [&](Move& move) {
                if (!move.to || !moved) return false;
                --moved;
                heap_.set_moved(move, plan.segment);
                vacated_.push_back({{move.segment, move.address, move.nbytes}, std::move(move.uses)});
                return true;
            });
        for (size_t i = 0; i < effect.out.size(); ++i) {
            const Effect::Span& one = effect.out[i];
            if (i >= effect.vacated) {
                if (i < unmapped) heap_.set_bare(one.segment, one.address, one.nbytes);
                continue;
            }
            auto found = std::ranges::find(vacated_, one.address, [](const Vacated& it) { return it.span.address; });
            if (found == vacated_.end()) continue;  // it did not move
            found->leaving = false;
            if (i >= unmapped) continue;
            heap_.let_go(one.segment, one.address, one.nbytes);
            vacated_.erase(found);
        }
        for (auto& one : std::span(effect.into).first(mapped)) heap_.set_mapped(one.segment, one.address, one.nbytes);
        coming_ -= job.change.fresh();
        called_ += seconds;
        if (job.reclaims) {
            leaving_ -= job.leaving;
            trims += unmapped > effect.vacated;
            refused_ = no_limit;
        } else {
            if (out_of_memory) refused_ = job.change.fresh();
        }
        if (!job.reclaims && !job.splits) {
            grows += mapped > 0 || moves;
            if (moves || unmapped) lifetime_.note_moved(seconds, now);
            moved_handles_ += effect.moves.size() + unmapped;
        }
        bool only_out = effect.moves.empty() && effect.into.empty();
        if (only_out && unmapped < effect.out.size()) pauses_until_ = now + refused_pause;
        note_peak();
        held_ = job.reclaims ? heap_.reserved() : std::max(held_, heap_.reserved());
        let_go(job.change);
    }

protected:
    uint64_t free() const override { return heap_.spread() - heap_.live(); }
    uint64_t reserved_or_leaving() const override { return heap_.reserved(); }

private:
    struct Found {
        std::optional<Change> change;
        Entries waits;             // without a change: what makes one possible once it is done,
        std::vector<Piece> later;  // and its parts
    };

    uint64_t available() const {
        uint64_t most = left();
        return refuses() ? std::min(most, refused_ - std::min(refused_, policy_.page)) : most;
    }

    // Moves save memory and cost time. The more of the time for them is spent, the more of the peak they must save: a program
    // that makes them go round and round is better off with more memory, also where it has rested before.
    bool is_worth(const Change& change, double now) const {
        double handles = 0, saved = 0;
        for (const Plan& plan : change.plans)
            for (const Move& move : plan.moves) ++handles, saved += static_cast<double>(move.nbytes);
        double all = std::min(grace, young * (now - lifetime_.began)) + policy_.dear * lifetime_.lived_lately(now);
        double spent = lifetime_.moved_lately(now);
        double cost = handles * (moved_handles_ ? lifetime_.moved / static_cast<double>(moved_handles_) : usual_move);
        return !handles || (spent <= most_moved * all && cost * spent * spent * static_cast<double>(peak_) <= all * all * all * saved);
    }
    bool may_be_foreign(const Request& request) const {
        return several_streams() && !request.terms.captured && !keeps_apart(request);
    }
    Bound reach(bool foreign) const {
        return !foreign ? Bound::Done : policy_.late_fences ? Bound::Any : Bound::Recorded;
    }
    static Ask ask_for(uint64_t nbytes, uint32_t stream, int32_t arena = -1) {
        return Ask{.nbytes = nbytes, .stream = stream, .arena = arena, .again = true};
    }

    bool has_addresses(const Request& request) {
        Bound bound = reach(may_be_foreign(request));
        return std::ranges::all_of(request.sizes(), [&](uint64_t nbytes) {
            return heap_.has_addresses(ask_for(nbytes, request.ask.stream), bound);
        });
    }

    // Whether a look at fences may find anything done that is not known to be.
    bool is_behind() const { return heap_.lags() || !heap_.unfenced().empty(); }
    Job look() const { return job_of({.kind = Effect::Kind::Look, .streams = heap_.unfenced()}); }

    Found plan_for(const Request& request, bool modest, double now, uint64_t spare = 0) {
        uint64_t left = available(), reserved = heap_.reserved() + coming_;
        uint64_t room = policy_.take_back ? std::min(left, peak_ - std::min(peak_, reserved)) : left;
        Found found = plan_within(request, room, modest ? 0 : left - room, now, spare);
        if (modest || !found.change || is_worth(*found.change, now)) return found;
        let_go(*found.change);
        return plan_within(request, left, 0, now, spare);
    }

    // With so much new memory as long as there is room, and so much more where that is not enough.
    Found plan_within(const Request& request, uint64_t room, uint64_t most, double now, uint64_t spare) {
        bool foreign = may_be_foreign(request);
        std::vector<uint64_t> sizes(request.sizes().begin(), request.sizes().end());
        bool early = !policy_.limited && !request.terms.captured && !request.batch();
        Found found = plan_pieces(sizes, request.ask.stream, foreign, room, most, now, early, spare);
        if (foreign && found.change && found.change->plans.empty())
            // All that is lacking is a way to the memory: it is another stream's, and cannot be waited for.
            found = plan_pieces(sizes, request.ask.stream, false, room, most, now, early, spare);
        return found;
    }

    // Pieces are taken one after the other as they will be taken in the end, and planned for where memory is lacking. What was
    // taken goes back as it was.
    Found plan_pieces(std::vector<uint64_t> sizes, uint32_t stream, bool foreign, uint64_t room, uint64_t most, double now,
                      bool early, uint64_t spare = 0) {
        std::sort(sizes.begin(), sizes.end(), std::greater<>());
        std::vector<std::pair<BlockId, Entries>> taken;
        Found found;
        found.change.emplace();
        for (uint64_t& nbytes : sizes) {
            if (sizes.size() > 1 && take(nbytes, stream, foreign, taken)) continue;
            uint64_t behind = &nbytes == &sizes.back() ? spare : 0;
            Plan plan = heap_.plan(ask_for(nbytes, stream), room, most, reach(foreign), parts_of(nbytes, now), behind, early,
                                   refused_ != 0);  // 0: moves alone were refused
            if (!plan.found) {
                let_go(*found.change);
                found.change.reset();
                found.waits = std::move(plan.waits);
                found.later = std::move(plan.later);
                break;
            }
            uint64_t fresh = Change::fresh(plan), back = 0, planned = plan.nbytes;
            for (const Move& move : plan.moves) back += move.to ? 0 : move.nbytes;
            if (!plan.moves.empty() || fresh) {
                found.change->plans.push_back(std::move(plan));
            } else if (planned) {
                heap_.let_go(plan.segment, plan.address, planned);
            }
            if (planned > rounded(nbytes)) break;  // the rest of its last page is for the next piece
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

    // Small handles can move when little is free, and what lives on a part of a large one keeps all of it; they cost by their
    // number, when memory comes and whenever a block on them is freed. So a pool has some hundreds, or fewer where the
    // time since its start does not allow that: then up to one for each gap. Below a limit all are small: what cannot move
    // there may fail a request.
    uint64_t parts_of(uint64_t nbytes, double now) const {
        if (policy_.limited) return std::max(usual_parts, nbytes / (policy_.limit / limit_parts + 1));
        uint64_t before = heap_.reserved() + coming_;
        if (!before) return least_parts;  // a pool that has just opened has had no time for more
        uint64_t fine = (before + nbytes) / fine_parts;
        uint64_t most = std::clamp(fine, nbytes / most_parts, nbytes / least_parts);
        most = static_cast<uint64_t>(std::min(static_cast<double>(most) * haste(now), static_cast<double>(nbytes)));
        return std::max<uint64_t>(1, nbytes / (most + 1));
    }

    // How many times more the device's calls have taken of the pool's life than they may, at least 1.
    double haste(double now) const {
        double allowed = affordable * policy_.dear * (now - lifetime_.began);
        return called_ <= allowed ? 1 : called_ / allowed;
    }

    // Where next to all is live, new memory is asked for again soon; the dearer that is, the more comes at once. Where some
    // is free, it is what serves then, but not where calls take most of the time and the last growth was for the same size:
    // more of that comes there, as no other size would fit it as well. What was reserved may be so again, until memory goes
    // back.
    uint64_t stock_for(const Request& request, double now) const {
        uint64_t reserved = heap_.reserved() + coming_ + request.total, left = available();
        left -= std::min(left, request.total);
        if (refuses() || left < reserved / far_off) return 0;
        double hurry = haste(now);
        double part = std::clamp(hurry / hasty / stock, 1 / stock, 1 / most_stock);
        // No more than a segment has, and with the request no more than two: what is large takes long to come.
        uint64_t usual = policy_.segment_size, most = std::min(usual, 2 * usual - std::min(2 * usual, request.total));
        uint64_t all = std::min(static_cast<uint64_t>(part * static_cast<double>(reserved)), most);
        uint64_t free = heap_.reserved() - heap_.live();
        uint64_t lacking = all - std::min(all, free), again = held_ - std::min(held_, reserved);
        if (hurry >= busy && request.total == grown_for_ && !several_streams())
            lacking = std::max(lacking, all / request.total * request.total + policy_.page - 1);
        return std::min(std::max(lacking, again), left) / policy_.page * policy_.page;
    }

    bool is_done(const Entry& use) const { return use.epoch <= heap_.epochs(use.stream).done; }

    // Nothing where nothing is to be done.
    Decision carried_out(Change change) {
        Job job = job_of({.kind = Effect::Kind::Remap});
        Effect& effect = job.effect;
        for (Vacated& one : vacated_) {
            if (one.leaving || !std::ranges::all_of(one.uses, [&](const Entry& use) { return is_done(use); })) continue;
            one.leaving = true;
            effect.out.push_back(one.span);
        }
        std::vector<Effect::Span> released;
        for (const Plan& plan : change.plans) {
            for (const Move& move : plan.moves) {
                Effect::Span span{move.segment, move.address, move.nbytes};
                if (move.to) effect.moves.push_back({span, move.to});
                if (move.uses.empty()) (move.to ? effect.out : released).push_back(span);
            }
            for (const Range& range : plan.fresh) effect.into.push_back({plan.segment, range.address, range.nbytes});
        }
        effect.vacated = effect.out.size();
        for (auto* spans : {&effect.out, &released})  // neighbours go in one call
            std::ranges::sort(*spans, {}, &Effect::Span::address);
        effect.out.insert(effect.out.end(), released.begin(), released.end());
        if (effect.moves.empty() && effect.out.empty() && effect.into.empty()) return {};
        coming_ += change.fresh();
        effect.nbytes = change.more();
        effect.need = effect.nbytes - std::min(effect.nbytes, change.ahead());
        job.change = std::move(change);
        return job;
    }

    // Let the heap have it all again, joined with what it was cut from.
    void let_go(const Change& change) {
        for (const Plan& plan : change.plans) {
            for (const Move& move : plan.moves) heap_.let_go(move.segment, move.address, move.nbytes);
            if (plan.nbytes) heap_.let_go(plan.segment, plan.address, plan.nbytes);
        }
    }

    // Addresses that memory has left, which are mapped until the device is done there; some are being unmapped just now.
    struct Vacated {
        Effect::Span span;
        Entries uses;
        bool leaving = false;
    };

    std::vector<Vacated> vacated_;
    uint64_t held_ = 0;  // the most that was reserved since memory went back
    double called_ = 0;  // seconds that the device's calls took
    uint64_t moved_handles_ = 0;  // in the time that moves took
    uint32_t beats_to_split_ = 0;
    uint64_t grown_for_ = 0;  // the size of the request that grew last
};

}  // namespace

std::unique_ptr<Source> make_pages(Heap& heap, const Policy& policy, double now) {
    return std::make_unique<PageSource>(heap, policy, now);
}

}  // namespace asyncmem::scheduler
