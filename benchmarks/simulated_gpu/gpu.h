// The simulated GPU's own: what CUDA's functions, a file for each thing that they do, share of its clock, streams and memory.
//
// It computes nothing but keeps time, memory and order. Streams, events, captures and the allocator's calls behave as CUDA's
// documentation says that they do.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gpu {

int64_t now();  // ns of CLOCK_MONOTONIC: the host's clock is the device's
void sleep_until(int64_t ns);
double setting(const char* name, double otherwise);  // of the environment

extern const int64_t start_of_kernel;  // ns that every kernel takes
extern const double cycles_per_ns;
const double memory_per_ns = 3000.0;  // bytes

// When a stream comes to an event: unknown while a collective before it waits for another rank.
struct Instant {
  int64_t at = 0;
  bool known = false;
};

struct Capture;
using Seen = std::vector<size_t>;  // of each stream of a capture the last work that is surely done

struct Event {
  std::shared_ptr<Instant> reached;  // since it was last recorded; none: it never was
  bool timed = true;
  uint64_t capture = 0;  // in which it was recorded last, and where
  size_t mark = 0;
  Seen seen;
};

// One thing that a stream does: a kernel, a copy, a fill; an event that is reached, or waited for.
struct Work {
  std::string name;
  int64_t length = 0;
  enum Kind { kernel, copy, fill, event, wait, host } kind = kernel;
  int copy_kind = 0, from = 0, to = 0;  // CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind
  uint64_t bytes = 0;
  dim3 grid{1, 1, 1}, block{1, 1, 1};
  Event* record = nullptr;
  void (*call)(void*) = nullptr;
  void* data = nullptr;
  std::function<void()> moves;  // bytes, when it is given its time
  // A collective: when it ends, if this rank comes to the communicator's `number`th at `begin`; negative: not known yet.
  std::function<int64_t(uint64_t number, int64_t& begin)> meets;
  uint64_t* numbers = nullptr;
  // As it was given to the stream.
  std::shared_ptr<Instant> instant;
  uint64_t number = 0;
  int64_t given = 0;
  uint32_t correlation = 0;
};

struct Stream {
  int64_t ready = 0;         // when all that has its time is done
  std::deque<Work> pending;  // has none yet: the first one waits for another rank, or for a stream that does
  std::deque<int64_t> launches;  // their ends, in order
  Capture* capture = nullptr;
  Seen seen;
  int priority = 0;
  unsigned flags = 0;
  uint32_t id = 0;
  int device = 0;
};

using Guard = std::lock_guard<std::recursive_mutex>;
extern std::recursive_mutex lock;
Stream* stream_of(cudaStream_t handle);

// devices.cpp. Devices are numbered as this process sees them; `card` is the machine's number of one.
int devices();
int card(int device);
int current_device();
const char* device_name();
int capability(bool minor);
int device_attribute(int attribute);

// Gives `work` to the stream: it begins when the stream is ready, or now. During a capture the graph is given it.
void enqueue(Stream* stream, Work work);

// kernels.cpp: gives a kernel to the stream. The host waits where the driver would take no more of them.
cudaError_t launch(Stream* stream, Work kernel);

// When all that the stream was given is done, or an event is reached: waits until that is known, not until it is so.
int64_t end_of(Stream* stream);
int64_t end_of(const Instant& instant);

// Gives their times to all works that can have one by now.
void catch_up();

// The host waits until it is so: for a stream, or for all of the current device, where one that captures may be refused.
cudaError_t waited(Stream* stream);
cudaError_t all_waited(bool refuses);

// memory.cpp: bytes of a device, and what another process and this one's context hold of them too.
extern const uint64_t capacity, held_by_others;
uint64_t memory_used(int device);
bool has_memory(int device);  // this process, beside its context
bool take_memory(uint64_t bytes, int device);
void give_memory(uint64_t bytes, int device);
void map_memory(void* at, uint64_t bytes, int device);  // addresses that have memory of it now
void unmap_memory(void* at);
int memory_kind(const void* at);  // pageable, pinned, of the device: CUpti_ActivityMemoryKind

// copies.cpp: bytes of device memory as a host gets them, and numbers of `each` bytes that were written there.
void read_memory(void* into, const void* from, size_t bytes);
void wrote_memory(void* at, size_t count, size_t each);

// errors.cpp: what calls fail with, and when the device does.
cudaError_t failed(cudaError_t error);  // and the last error
cudaError_t broken();                   // the error of a device that failed an assertion
void fail_at(int64_t ns);               // or before
void wait_until(int64_t ns);            // or until it fails

// graphs.cpp: what a capture makes of work, of events and of calls.
void captured(Stream* stream, Work work);
void record_captured(Stream* stream, Event* event);
cudaError_t wait_captured(Stream* stream, Event* event, bool external);
cudaError_t refused(Stream* stream);  // of a stream that captures
cudaError_t unsafe();                 // of CUDA's "potentially unsafe API calls"

// activity.cpp: what CUPTI would tell.
uint32_t next_correlation();
void tell_call(const char* function, int64_t begin, int64_t end, uint32_t correlation);
void tell_work(const Work& work, const Stream& stream, int64_t begin, int64_t end, uint32_t correlation);
extern thread_local uint32_t correlation;  // of the call that is being made

// A call is told to CUPTI's listeners, with a number that its kernel has too. What it calls itself is not.
struct Told {
  const char* function;
  int64_t begin;
  bool inner;
  explicit Told(const char* name) : function(name), begin(now()), inner(correlation) {
    if (!inner) correlation = next_correlation();
  }
  ~Told() {
    if (inner) return;
    tell_call(function, begin, now(), correlation);
    correlation = 0;
  }
};

}  // namespace gpu

// What a function that CUDA has begins with.
#define TOLD Told told(__func__)
#define ALIVE \
  if (cudaError_t error = broken()) return failed(error)
