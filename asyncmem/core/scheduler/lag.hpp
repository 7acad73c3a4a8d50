// How far behind the device is: when what a stream was given is likely to be done.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "heap.hpp"

namespace asyncmem::scheduler {

class Lag {
public:
    explicit Lag(const Heap& heap) : heap_(heap) {}

    // Fences were recorded and looked at.
    void look(double now) {
        streams_.resize(heap_.stream_count());
        for (uint32_t s = 0; s < streams_.size(); ++s) {
            Stream& stream = streams_[s];
            Epochs epochs = heap_.epochs(s);
            for (; !stream.fences.empty() && stream.fences.front().epoch <= epochs.done; stream.fences.pop_front())
                add(now - stream.fences.front().recorded);
            if (epochs.recorded > epochs.done && (stream.fences.empty() || stream.fences.back().epoch < epochs.recorded))
                stream.fences.push_back({epochs.recorded, now});
        }
    }

    // Whether any fence was seen done yet; before, nothing is known.
    bool known() const { return !seen_.empty(); }

    void shift(double seconds) {
        for (Stream& stream : streams_)
            for (Fence& fence : stream.fences) fence.recorded += seconds;
    }

    // When all of these uses are likely to be done.
    double end(const Entries& uses, double now) const {
        double latest = now;
        for (const Entry& use : uses) {
            double recorded = now;
            if (use.stream < streams_.size())
                for (const Fence& fence : streams_[use.stream].fences)
                    if (fence.epoch >= use.epoch) {
                        recorded = fence.recorded;
                        break;
                    }
            latest = std::max(latest, recorded + usual());
        }
        return latest;
    }

private:
    struct Fence {
        uint64_t epoch;
        double recorded;
    };
    struct Stream {
        std::deque<Fence> fences;
    };
    static constexpr size_t samples = 8;

    // Fences are seen done some time after they are, so the least of the last few is the nearest to the truth.
    double usual() const { return seen_.empty() ? 0 : *std::min_element(seen_.begin(), seen_.end()); }
    void add(double seconds) {
        if (seen_.size() == samples) seen_.pop_front();
        seen_.push_back(seconds);
    }

    const Heap& heap_;
    std::vector<Stream> streams_;
    std::deque<double> seen_;
};

}  // namespace asyncmem::scheduler
