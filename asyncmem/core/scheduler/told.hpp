// What a scheduler is told, and its effects, as a journal writes them.
#pragma once

#include "../written.hpp"
#include "scheduler.hpp"

namespace asyncmem::scheduler {

inline void put(std::string& text, Effort effort) { asyncmem::put(text, effort_names[static_cast<size_t>(effort)]); }
inline void put(std::string& text, State state) { asyncmem::put(text, state_names[static_cast<size_t>(state)]); }
inline void put(std::string& text, Reason reason) { asyncmem::put(text, reason_names[static_cast<size_t>(reason)]); }
inline void put(std::string& text, const Terms& terms) {
    put_all(text, terms.deadline, terms.priority, terms.effort, terms.waits, terms.calls, terms.on_loop, terms.captured);
}
inline void put(std::string& text, const Claim& claim) { put_all(text, claim.owner, claim.nbytes, claim.account); }
inline void put(std::string& text, const Return& one) { put_all(text, one.address, one.nbytes, one.uses); }
inline void put(std::string& text, const Effect::Span& span) { put_all(text, span.address, span.nbytes); }

// An object, field by field.
class Fields {
public:
    explicit Fields(std::string& text) : text_(text) { text_ += '{'; }
    ~Fields() { text_ += '}'; }
    template <typename Value>
    Fields& operator()(const char* name, const Value& value) {
        using asyncmem::put;
        put(text_ += first_ ? "" : ",", name);
        put(text_ += ':', value);
        first_ = false;
        return *this;
    }
    // The same where there is something to say.
    template <typename Value>
    Fields& known(const char* name, const Value& value) {
        if constexpr (requires { value.empty(); })
            return value.empty() ? *this : (*this)(name, value);
        else
            return value == Value{} ? *this : (*this)(name, value);
    }

private:
    std::string& text_;
    bool first_ = true;
};

inline void put(std::string& text, const Policy& policy) {
    Fields fields(text);
    fields("limit", policy.limit)("limited", policy.limited)("paged", policy.paged)("direct", policy.direct);
    fields("granularity", policy.granularity)("page", policy.page)("segment_size", policy.segment_size);
    fields("ready", policy.ready)("late_fences", policy.late_fences);
    policy.overlap_share > 0 ? fields("overlap", policy.overlap_share) : fields("overlap", policy.overlap_bytes);
    fields("overlap_least", policy.overlap_least)("patience", policy.patience)("patience_share", policy.patience_share);
    fields("take_back", policy.take_back)("bypass", policy.bypass)("max_waiting", policy.max_waiting);
    fields("fallback", policy.fallback)("quiet_after", policy.quiet_after)("merge_threshold", policy.merge_threshold);
    fields("defragment", policy.defragment)("adaptive", policy.adaptive)("shrink_after", policy.shrink_after);
    put_fields(text += ',', policy.tuning);
}

inline void put(std::string& text, const Effect& effect) {
    Fields fields(text);
    fields("kind", Effect::names[static_cast<size_t>(effect.kind)]);
    fields.known("request", effect.request).known("job", effect.job).known("by_caller", effect.by_caller);
    fields.known("nbytes", effect.nbytes).known("need", effect.need).known("arena", effect.arena);
    fields.known("stream", effect.stream).known("account", effect.account).known("level", effect.level);
    fields.known("seconds", effect.seconds).known("streams", effect.streams).known("returns", effect.returns);
    fields.known("uses", effect.uses).known("out", effect.out).known("into", effect.into);
    fields.known("moved", effect.moved).known("ahead", effect.ahead);
}

}  // namespace asyncmem::scheduler
