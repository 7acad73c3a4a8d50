// A fence behind every stream of a context, for drivers that have none: the host sees all work done.
#pragma once

#include <mutex>
#include <vector>

namespace asyncmem::gpu {

class Context;
struct Fence;

// CUDA has such fences from 12.5 on, HIP has none. Without them nothing in stream order is behind the streams of other
// libraries that were not named. So a thread waits until the whole device is done, and no stream can wait for that.
class Gathering {
  public:
    explicit Gathering(Context &context) : context_(context) {}
    // Has a fence reached once all is done that was submitted before; takes over a reference. False where no thread is
    // to be had.
    bool add(Fence *fence);

  private:
    void run();
    int wait_for_all();

    Context &context_;
    std::mutex lock_;
    std::vector<Fence *> coming_;
    bool running_ = false; // the thread ends when nothing is left to wait for
};

} // namespace asyncmem::gpu
