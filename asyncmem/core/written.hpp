// What a heap is told and answers, as a journal writes it.
#pragma once

#include "heap.hpp"

namespace asyncmem {

inline void put(std::string& text, const Entry& entry) { put_all(text, entry.stream, entry.epoch); }
inline void put(std::string& text, const Granted& one) { put_all(text, one.block, one.address); }
inline void put(std::string& text, const Ask& ask) {
    put_all(text, ask.nbytes, ask.stream, ask.account, ask.arena, ask.anywhere, ask.again, ask.door);
}
inline void put(std::string& text, const Outcome& outcome) {
    put_all(text, outcome.level, static_cast<uint8_t>(outcome.reason), outcome.flags, outcome.address);
}

// The fields of an object, by the names that Python has for them.
inline void put_fields(std::string& text, const Tuning& tuning) {
    auto field = [&](const char* name, uint64_t value) {
        put(text, name);
        put(text += ':', value);
        text += ',';
    };
    field("small_limit", tuning.small_limit);
    field("stream_cache_blocks", tuning.stream_cache_blocks);
    field("stream_cache_bytes", tuning.stream_cache_bytes);
    field("shared_cache_blocks", tuning.shared_cache_blocks);
    field("shared_cache_bytes", tuning.shared_cache_bytes);
    put(text += "\"strategy\":", tuning.best_fit ? "best_fit" : "good_fit");
}
inline void put(std::string& text, const Tuning& tuning) {
    put_fields(text += '{', tuning);
    text += '}';
}

}  // namespace asyncmem
