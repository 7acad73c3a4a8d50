// Accounts: who holds how much and may hold how much. Every charge goes to an account and to all above it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "node.hpp"

namespace asyncmem {

constexpr uint64_t no_limit = INT64_MAX;

struct Account {
    uint64_t limit = no_limit;
    uint64_t live = 0, requested = 0, peak = 0;
    uint64_t promised = 0;             // to requests for which memory is being made
    uint64_t frees = 0, hits[3] = {};  // hits: grants by level, 1 to 3
    int64_t adopted = 0;               // live blocks that ended leases left to it, less those leases' own blocks
    int32_t parent = -1;
    uint32_t children = 0;
    bool used = false;
    bool inner = false;    // below none of the pool's: serves the inside of leases, whose block is charged already
    bool gated = false;    // its gate is closed
    bool touched = false;  // bytes came back since `take_touched`

    uint64_t grants() const { return hits[0] + hits[1] + hits[2]; }
    uint64_t blocks() const { return grants() - frees + static_cast<uint64_t>(adopted); }
    uint64_t room() const { return limit - std::min(limit, live + promised); }

    void charge(uint64_t nbytes, uint64_t asked) {
        live += nbytes;
        requested += asked;
        peak = std::max(peak, live);
    }
    void credit(uint64_t nbytes, uint64_t asked) {
        live -= nbytes;
        requested -= asked;
    }
    void add_counters(const Account& other) {
        frees += other.frees;
        for (int level = 0; level < 3; ++level) hits[level] += other.hits[level];
    }
};

class Accounts {
public:
    Accounts() { accounts_[0].used = true; }

    bool known(int64_t id) const {
        return id >= 0 && static_cast<size_t>(id) < accounts_.size() && accounts_[id].used;
    }
    Account& operator[](uint32_t id) { return accounts_[id]; }
    const Account& operator[](uint32_t id) const { return accounts_[id]; }
    uint32_t size() const { return accounts_.size(); }

    // A closed gate of account 0, left ajar: where no other is closed, fast takes may pass for so many bytes yet, and a free is
    // told only once as many are free as the waiting request wants.
    void leave_ajar(uint64_t allowance, uint64_t wanted) {
        allowance_ = allowance;
        wanted_ = wanted;
    }
    // The end of that; what has passed is kept for `passed`.
    void close_up() { allowance_ = wanted_ = 0; }
    bool may_pass(uint64_t nbytes) const { return nbytes <= allowance_ && gates_closed_ == 1; }
    void pass(uint64_t nbytes) {
        allowance_ -= nbytes;
        passed_ += nbytes;
    }
    // Bytes that have passed since this was asked last.
    uint64_t passed() { return std::exchange(passed_, 0); }
    // Whether a free that leaves so many bytes free is of interest to those who wait.
    bool told(uint64_t free) const { return gates_closed_ && (free >= wanted_ || gates_closed_ > 1); }

    void set_gate(uint32_t id, bool closed) {
        if (id == 0) close_up();
        if (accounts_[id].gated == closed) return;
        accounts_[id].gated = closed;
        gates_closed_ += closed ? 1 : -1;
    }

    bool affordable(uint32_t id, uint64_t nbytes) const {
        for (int32_t a = static_cast<int32_t>(id); a >= 0; a = accounts_[a].parent)
            if (accounts_[a].live + accounts_[a].promised + nbytes > accounts_[a].limit) return false;
        return true;
    }
    // Whether the gate of an account, or that of one above, is closed.
    bool barred(uint32_t id) const {
        if (!gates_closed_) return false;
        for (int32_t a = static_cast<int32_t>(id); a >= 0; a = accounts_[a].parent)
            if (accounts_[a].gated) return true;
        return false;
    }
    // How often blocks were given back so far.
    uint64_t returns() const { return returns_; }
    // The accounts whose gates were closed when bytes of theirs came back, since this was asked last.
    std::vector<uint32_t> take_touched() {
        for (uint32_t id : touched_) accounts_[id].touched = false;
        return std::exchange(touched_, {});
    }

    // The most that was live in account 0, and the same since this was asked last.
    uint64_t peak() const { return std::max(past_peak_, accounts_[0].peak); }
    uint64_t recent_peak() {
        past_peak_ = peak();
        return std::exchange(accounts_[0].peak, accounts_[0].live);
    }
    void reset_peaks() {
        past_peak_ = 0;
        for (Account& account : accounts_) account.peak = account.live;
    }

    // Bytes that count as if they were live, or below 0 do so no more.
    void promise(uint32_t id, int64_t nbytes) {
        each_up(id, [&](Account& one) { one.promised += static_cast<uint64_t>(nbytes); });
    }
    // `count` blocks granted at `level` (1, 2, 3), given back, and one grant undone.
    void grant(uint32_t id, uint64_t nbytes, uint64_t requested, uint32_t level, uint64_t count = 1) {
        each_up(id, [&](Account& one) {
            one.charge(nbytes, requested);
            one.hits[level - 1] += count;
        });
    }
    void free(uint32_t id, uint64_t nbytes, uint64_t requested, uint64_t count = 1) {
        ++returns_;
        if (gates_closed_ && accounts_.size() > 1) [[unlikely]] touch(id);
        each_up(id, [&](Account& one) {
            one.credit(nbytes, requested);
            one.frees += count;
        });
    }
    void undo(uint32_t id, uint64_t nbytes, uint64_t requested, uint32_t level) {
        touch(id);
        each_up(id, [&](Account& one) {
            one.credit(nbytes, requested);
            --one.hits[level - 1];
        });
    }
    // A live block comes or goes without being granted or freed: the block of a lease goes to those inside.
    void adopt(uint32_t id, uint64_t nbytes, uint64_t requested) {
        each_up(id, [&](Account& one) {
            one.charge(nbytes, requested);
            ++one.adopted;
        });
    }
    void leave(uint32_t id, uint64_t nbytes, uint64_t requested) {
        ++returns_;
        touch(id);
        each_up(id, [&](Account& one) {
            one.credit(nbytes, requested);
            --one.adopted;
        });
    }

    // Everything that was ever granted and freed, by accounts that are gone too.
    Account totals() const {
        Account sum = gone_;
        for (const Account& account : accounts_)
            if (account.used && account.parent < 0) sum.add_counters(account);
        return sum;
    }

    uint32_t add(int32_t parent, uint64_t limit) {
        uint32_t id = accounts_.acquire();
        accounts_[id] = {.limit = limit, .parent = parent, .used = true};
        accounts_[id].inner = parent < 0 || accounts_[parent].inner;
        if (parent >= 0) ++accounts_[parent].children;
        return id;
    }

    void remove(uint32_t id) {
        Account gone = std::exchange(accounts_[id], {});
        accounts_.release(id);
        gates_closed_ -= gone.gated;
        if (gone.touched) std::erase(touched_, id);
        if (gone.parent < 0) {
            gone_.add_counters(gone);
            return;
        }
        --accounts_[gone.parent].children;
        if (gone.touched) touch(static_cast<uint32_t>(gone.parent));
    }

private:
    template <typename Change>
    void each_up(uint32_t id, Change change) {
        for (int32_t a = static_cast<int32_t>(id); a >= 0; a = accounts_[a].parent) change(accounts_[a]);
    }
    void touch(uint32_t id) {
        if (!std::exchange(accounts_[id].touched, true)) touched_.push_back(id);
    }

    Slots<Account> accounts_{1};
    std::vector<uint32_t> touched_;
    Account gone_;  // counters of removed accounts that had none above them
    uint32_t gates_closed_ = 0;
    uint64_t allowance_ = 0, wanted_ = 0, passed_ = 0, returns_ = 0;
    uint64_t past_peak_ = 0;  // of account 0, before its peak began again
};

}  // namespace asyncmem
