// Accounts (who holds how much, and may hold), gates and watermarks.
#include "heap.hpp"

#include <algorithm>
#include <stdexcept>

namespace asyncmem {

bool Heap::affordable(uint32_t account, uint64_t nbytes) const {
    for (int32_t a = static_cast<int32_t>(account); a >= 0; a = accounts_[a].parent)
        if (accounts_[a].live + nbytes > accounts_[a].limit) return false;
    return true;
}

void Heap::charge(uint32_t account, uint64_t nbytes, uint64_t requested) {
    for (int32_t a = static_cast<int32_t>(account); a >= 0; a = accounts_[a].parent) {
        accounts_[a].live += nbytes;
        accounts_[a].requested += requested;
        accounts_[a].peak = std::max(accounts_[a].peak, accounts_[a].live);
    }
}

void Heap::credit(uint32_t account, uint64_t nbytes, uint64_t requested) {
    for (int32_t a = static_cast<int32_t>(account); a >= 0; a = accounts_[a].parent) {
        accounts_[a].live -= nbytes;
        accounts_[a].requested -= requested;
    }
}

uint32_t Heap::add_account(int64_t parent, uint64_t limit) {
    std::lock_guard lock(mutex_);
    if (parent != -1) need_account(parent);
    uint32_t id;
    if (free_accounts_.empty()) {
        id = static_cast<uint32_t>(accounts_.size());
        accounts_.emplace_back();
    } else {
        id = free_accounts_.back();
        free_accounts_.pop_back();
    }
    accounts_[id] = Account{};
    accounts_[id].used = true;
    accounts_[id].limit = limit;
    accounts_[id].parent = static_cast<int32_t>(parent);
    if (parent >= 0) ++accounts_[parent].children;
    update_bars();
    return id;
}

void Heap::remove_account(uint32_t account) {
    std::lock_guard lock(mutex_);
    need_account(account);
    Account& gone = accounts_[account];
    if (account == 0) throw std::invalid_argument("account 0 is the pool's own");
    if (gone.live || gone.children) throw std::invalid_argument("the account still has live bytes or accounts below it");
    if (gone.gated) --gates_closed_;
    if (gone.parent >= 0) --accounts_[gone.parent].children;
    gone = Account{};
    free_accounts_.push_back(account);
}

void Heap::set_limit(uint32_t account, uint64_t limit) {
    std::lock_guard lock(mutex_);
    need_account(account);
    accounts_[account].limit = limit;
}

Account Heap::account(uint32_t account) const {
    std::lock_guard lock(mutex_);
    need_account(account);
    return accounts_[account];
}

std::vector<uint32_t> Heap::accounts() const {
    std::lock_guard lock(mutex_);
    std::vector<uint32_t> used;
    for (uint32_t a = 0; a < accounts_.size(); ++a)
        if (accounts_[a].used) used.push_back(a);
    return used;
}

void Heap::set_gate(uint32_t account, bool closed) {
    std::lock_guard lock(mutex_);
    need_account(account);
    if (accounts_[account].gated == closed) return;
    accounts_[account].gated = closed;
    gates_closed_ += closed ? 1 : -1;
    update_bars();
}

// Fold the gates above each account into one flag: the doors read one byte, gates change rarely.
void Heap::update_bars() {
    for (Account& account : accounts_) {
        account.barred = account.gated;
        for (int32_t a = account.parent; a >= 0 && !account.barred; a = accounts_[a].parent)
            account.barred = accounts_[a].gated;
    }
}

void Heap::set_marks(uint64_t live_low, uint64_t live_high, uint64_t free_low) {
    std::lock_guard lock(mutex_);
    live_low_ = live_low;
    live_high_ = live_high;
    free_low_ = free_low;
}

void Heap::reset_peaks() {
    std::lock_guard lock(mutex_);
    for (Account& account : accounts_) account.peak = account.live;
    total_.peak_live = live_;
    total_.peak_cached = cached_;
    total_.peak_reserved = reserved_;
}

void Heap::need_account(int64_t account) const {
    if (account < 0 || static_cast<size_t>(account) >= accounts_.size() || !accounts_[account].used)
        throw std::invalid_argument("unknown account");
}

}  // namespace asyncmem
