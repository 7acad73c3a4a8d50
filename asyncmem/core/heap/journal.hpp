// A journal: what a heap and its scheduler were told from outside, call by call, so that it can be told again.
//
// Both do the same whenever they are told the same in the same order, so nothing else has to be written. A line is JSON:
// [name, arguments, result, effects], the last only where there are some. Names and arguments are those of the Python face
// (asyncmem/replay/journal.py has the list). What a call makes of other calls inside of it is not written.
#pragma once

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace asyncmem {

// -- values as text ----------------------------------------------------------------------------------------------------

inline void put(std::string& text, bool value) { text += value ? "true" : "false"; }
inline void put(std::string& text, std::nullptr_t) { text += "null"; }
inline void put(std::string& text, const char* word) { ((text += '"') += word) += '"'; }

template <std::integral Number>
    requires(!std::same_as<Number, bool>)
void put(std::string& text, Number value) {
    if constexpr (std::same_as<Number, uint64_t>)
        if (value == std::numeric_limits<uint64_t>::max()) {  // no limit, no number
            text += "null";
            return;
        }
    char digits[24];
    text.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

// As many digits as it takes to read the same number again, and always a sign that it may have a fraction.
inline void put(std::string& text, double value) {
    if (!std::isfinite(value)) {
        text += "null";
        return;
    }
    char digits[40];
#ifdef __cpp_lib_to_chars
    std::string_view written(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
#else
    std::string_view written(digits, std::snprintf(digits, sizeof digits, "%.17g", value));
    std::replace(digits, digits + written.size(), ',', '.');  // some languages have a comma
#endif
    text += written;
    if (written.find_first_of(".e") == std::string_view::npos) text += ".0";
}

template <typename One>
void put(std::string& text, std::span<One> values) {
    text += '[';
    for (size_t i = 0; i < values.size(); ++i) {
        if (i) text += ',';
        put(text, values[i]);
    }
    text += ']';
}

template <typename One>
void put(std::string& text, const std::vector<One>& values) {
    put(text, std::span<const One>(values));
}

template <typename... Values>
void put_all(std::string& text, const Values&... values) {
    text += '[';
    size_t count = 0;
    ((text += count++ ? "," : "", put(text, values)), ...);
    text += ']';
}

// An argument that the call fills in: part of its result.
template <typename Value>
struct Filled {
    Value& value;
    operator Value&() const { return value; }
};
template <typename Value>
Filled<Value> filled(Value& value) {
    return {value};
}
template <typename Value>
constexpr bool is_filled = false;
template <typename Value>
constexpr bool is_filled<Filled<Value>> = true;

// -- the journal -------------------------------------------------------------------------------------------------------

// What is written as long as there is memory for it: no call fails because it cannot be written.
class Written {
protected:
    void safely(auto&& writing) noexcept {
        if (cut_) return;
        try {
            writing();
        } catch (const std::bad_alloc&) {
            cut_ = true;
        }
    }

    bool cut_ = false;  // memory ran out
};

class Journal : Written {
public:
    // A call that the journal is about, until it returns: no other is made meanwhile. Nothing where there is no journal.
    class Turn {
    public:
        explicit Turn(Journal* journal) : journal_(journal && journal->is_outside() ? journal : nullptr) {
            if (!journal_) return;
            journal_->lock_.lock();
            journal_->inside_.store(here(), std::memory_order_relaxed);
        }
        ~Turn() {
            if (!journal_) return;
            journal_->inside_.store(nullptr, std::memory_order_relaxed);
            journal_->lock_.unlock();
        }
        Turn(const Turn&) = delete;
        // Whether it comes from outside, and is to be written.
        explicit operator bool() const { return journal_; }

    private:
        Journal* journal_;
    };

    bool is_outside() const { return inside_.load(std::memory_order_relaxed) != here(); }

    // Make a call from outside, and write it.
    template <typename Call, typename... Arguments>
    [[gnu::noinline, gnu::cold]] auto write(const char* name, Call&& call, Arguments&&... arguments) {
        using Result = std::invoke_result_t<Call, Arguments...>;
        Turn turn(this);
        safely([&] {
            begin(name);
            (put_argument(arguments), ...);
            if (lines_.back() == ',') lines_.pop_back();
            lines_ += "],";
        });
        try {
            if constexpr (std::is_void_v<Result>) {
                call(arguments...);
                end([&] { put_result(nullptr, arguments...); });
            } else {
                Result result = call(arguments...);
                end([&] { put_result(result, arguments...); });
                return result;
            }
        } catch (...) {
            end([&] { put(lines_, "error"); });
            throw;
        }
    }

    // A call that takes nothing and returns nothing, by the thread whose turn it is.
    void add(const char* name) {
        safely([&] { begin(name); });
        end([&] { lines_ += "],null"; });
    }

    // What came out of the call that is being made.
    template <typename Effect>
    void add_effect(const Effect& effect) {
        safely([&] {
            effects_ += effects_.empty() ? ",[" : ",";
            put(effects_, effect);
        });
    }

    // Take out the oldest lines, a part at a time, so that no thread waits for long; empty where there are none.
    std::string read() {
        std::lock_guard lock(lock_);
        if (full_.empty()) return std::exchange(lines_, {});
        std::string part = std::move(full_.front());
        full_.pop_front();
        return part;
    }
    // Whether memory ran out, and none come any more.
    bool is_cut() {
        std::lock_guard lock(lock_);
        return cut_;
    }

private:
    static constexpr size_t part_bytes = 64 << 10;

    static const void* here() {
        static thread_local char mine;
        return &mine;
    }

    // Where memory runs out, what there is of the line shows that it is torn.
    void begin(const char* name) {
        lines_ += '[';
        put(lines_, name);
        lines_ += ",[";
    }

    void end(auto&& put_outcome) noexcept {
        safely([&] {
            put_outcome();
            lines_ += effects_;
            lines_ += effects_.empty() ? "]\n" : "]]\n";
            if (lines_.size() < part_bytes) return;
            full_.push_back(std::exchange(lines_, {}));
            lines_.reserve(part_bytes + part_bytes / 16);
        });
        effects_.clear();
    }

    template <typename Value>
    void put_argument(const Value& value) {
        if constexpr (!is_filled<Value>) {
            put(lines_, value);
            lines_ += ',';
        }
    }

    // What it returned; with what it filled in, if anything, in one list.
    template <typename Result, typename... Arguments>
    void put_result(const Result& returned, const Arguments&... arguments) {
        constexpr bool several = (is_filled<Arguments> || ...);
        if (several) lines_ += '[';
        put(lines_, returned);
        (put_filled(arguments), ...);
        if (several) lines_ += ']';
    }
    template <typename Value>
    void put_filled(const Value& value) {
        if constexpr (is_filled<Value>) put(lines_ += ',', value.value);
    }

    std::mutex lock_;
    std::atomic<const void*> inside_{nullptr};
    std::string lines_, effects_;  // the newest; those of the call that is being made
    std::deque<std::string> full_;
};

// The head of a method that is told something: where there is a journal, and the call comes from outside, write it. And
// the same with the lock held from then on.
#define ASYNCMEM_WRITTEN(name, ...)                             \
    if (journal_ && journal_->is_outside()) [[unlikely]]        \
    return journal_->write(                                     \
        #name, [&](auto&&... own) { return name(own...); } __VA_OPT__(, ) __VA_ARGS__)
#define ASYNCMEM_ENTER(...)       \
    ASYNCMEM_WRITTEN(__VA_ARGS__); \
    std::lock_guard lock(lock_)

}  // namespace asyncmem
