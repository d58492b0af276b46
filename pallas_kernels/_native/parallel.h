// A parallel loop on XLA's own threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace native {

// Calls body(i) once for each i below count, and returns when all have returned. The caller takes part and never
// waits for a task that has not begun, so a pool whose threads are all busy (with this very function, perhaps) is no
// deadlock: tasks that begin late find nothing left.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool pool, int64_t count, const Body& body) {
  int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t count, done = 0;  // done: under the mutex
    const Body* body;
    std::mutex mutex;
    std::condition_variable finished;
    void work() {
      int64_t mine = 0;
      for (int64_t i; (i = next.fetch_add(1)) < count; ++mine) (*body)(i);
      if (mine == 0) return;
      std::lock_guard<std::mutex> lock(mutex);
      done += mine;
      if (done == count) finished.notify_one();
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->body = &body;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->work(); });
  shared->work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->finished.wait(lock, [&] { return shared->done == count; });
}

// Memory of this thread, kept from call to call and never given back: a step asks for the same again.
template <int kUse>
float* scratch(size_t num_floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < num_floats + 16) memory.resize(num_floats + 16);
  uintptr_t start = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + ((64 - start % 64) % 64) / 4;
}

}  // namespace native
