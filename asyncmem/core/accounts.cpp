// Accounts, gates and marks.
#include <algorithm>
#include <stdexcept>

#include "written.hpp"

namespace asyncmem {

namespace {
void add_counters(Account& sum, const Account& account) {
    sum.frees += account.frees;
    for (int level = 0; level < 3; ++level) sum.hits[level] += account.hits[level];
}
}  // namespace

Account Ledger::totals() const {
    Account sum = gone_;
    for (const Account& account : accounts_)
        if (account.used && account.parent < 0) add_counters(sum, account);
    return sum;
}

uint32_t Ledger::add(int32_t parent, uint64_t limit) {
    uint32_t id = accounts_.acquire();
    accounts_[id] = {.limit = limit, .parent = parent, .used = true};
    accounts_[id].inner = parent < 0 || accounts_[parent].inner;
    if (parent >= 0) ++accounts_[parent].children;
    return id;
}

void Ledger::remove(uint32_t id) {
    Account& gone = accounts_[id];
    if (gone.gated) --gates_closed_;
    if (gone.touched) {
        std::erase(touched_, id);
        if (gone.parent >= 0) touch(static_cast<uint32_t>(gone.parent));
    }
    if (gone.parent >= 0) {
        --accounts_[gone.parent].children;
    } else {
        add_counters(gone_, gone);
    }
    gone = Account{};
    accounts_.release(id);
}

void Ledger::set_gate(uint32_t id, bool closed) {
    if (id == 0) close_up();
    if (accounts_[id].gated == closed) return;
    accounts_[id].gated = closed;
    gates_closed_ += closed ? 1 : -1;
}

uint32_t Heap::add_account(int64_t parent, uint64_t limit) {
    ASYNCMEM_WRITTEN(add_account, parent, limit);
    std::lock_guard lock(lock_);
    if (parent != -1) need_account(parent);
    return ledger_.add(static_cast<int32_t>(parent), limit);
}

void Heap::remove_account(uint32_t account) {
    ASYNCMEM_WRITTEN(remove_account, account);
    std::lock_guard lock(lock_);
    need_account(account);
    if (account == 0) throw std::invalid_argument("account 0 is the pool's own");
    if (ledger_[account].live || ledger_[account].children)
        throw std::invalid_argument("the account still has live bytes or accounts below it");
    ledger_.remove(account);
}

void Heap::set_limit(uint32_t account, uint64_t limit) {
    std::lock_guard lock(lock_);
    need_account(account);
    ledger_[account].limit = limit;
}

void Heap::promise(uint32_t account, uint64_t nbytes) {
    std::lock_guard lock(lock_);
    need_account(account);
    ledger_.promise(account, nbytes);
}

void Heap::unpromise(uint32_t account, uint64_t nbytes) {
    std::lock_guard lock(lock_);
    need_account(account);
    ledger_.unpromise(account, nbytes);
}

uint32_t Heap::stream_count() const {
    std::lock_guard lock(lock_);
    return static_cast<uint32_t>(streams_.size());
}

std::vector<uint32_t> Heap::take_touched() {
    std::lock_guard lock(lock_);
    return ledger_.take_touched();
}

Account Heap::account(uint32_t account) const {
    std::lock_guard lock(lock_);
    need_account(account);
    return ledger_[account];
}

void Heap::set_gate(uint32_t account, bool closed) {
    std::lock_guard lock(lock_);
    need_account(account);
    ledger_.set_gate(account, closed);
}

void Heap::leave_ajar(uint64_t allowance, uint64_t wanted) {
    std::lock_guard lock(lock_);
    if (ledger_[0].gated) ledger_.leave_ajar(allowance, wanted);
}

uint64_t Heap::close_up() {
    std::lock_guard lock(lock_);
    ledger_.close_up();
    return ledger_.passed();
}

void Heap::set_marks(uint64_t live_low, uint64_t live_high) {
    std::lock_guard lock(lock_);
    live_low_ = live_low;
    live_high_ = live_high;
}

void Heap::reset_peaks() {
    ASYNCMEM_WRITTEN(reset_peaks);
    std::lock_guard lock(lock_);
    for (uint32_t a = 0; a < ledger_.size(); ++a) ledger_[a].peak = ledger_[a].live;
    total_.peak_cached = cached_;
    total_.peak_reserved = reserved_;
}

void Heap::need_account(int64_t account) const {
    if (!ledger_.known(account)) throw std::invalid_argument("unknown account");
}

}  // namespace asyncmem
