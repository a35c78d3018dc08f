// What a stream does when: one thing after another, each as soon as it is given and the one before is done.
//
// The time of most work is known when it is given. A collective ends when the last rank has come, which may be a process
// that has not got that far: it and all that is behind it are kept until its end is known, and then have their times.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <ctime>
#include <set>
#include <thread>

#include "gpu.h"

namespace gpu {

std::recursive_mutex lock;

namespace {

std::set<Stream*> streams;
Stream* default_stream() {
  static Stream* of[16] = {};
  Guard guard(lock);
  Stream*& stream = of[current_device()];
  if (!stream) {
    stream = new Stream{};
    stream->id = 7;  // CUPTI's number of it
    stream->device = current_device();
    streams.insert(stream);
  }
  return stream;
}

std::set<Stream*>& behind() {  // have work without a time
  static auto* late = new std::set<Stream*>;
  return *late;
}

void call_host(void (*call)(void*), void* data, int64_t at) {
  std::thread([=] {
    sleep_until(at);
    call(data);
  }).detach();
}

void happens(Work& work, Stream& stream, int64_t begin, int64_t end) {
  if (work.moves) work.moves();
  if (work.kind == Work::event) *work.instant = {end, true};
  else if (work.kind == Work::host) call_host(work.call, work.data, end);
  else tell_work(work, stream, begin, end, work.correlation);
}

// Whether any work was given its time.
bool lay_out(Stream& stream) {
  bool any = false;
  for (; !stream.pending.empty(); stream.pending.pop_front(), any = true) {
    Work& work = stream.pending.front();
    if (work.kind == Work::wait) {
      if (!work.instant->known) break;
      stream.ready = std::max(stream.ready, work.instant->at);
      continue;
    }
    int64_t begin = std::max(stream.ready, work.given);
    int64_t end = work.meets ? work.meets(work.number, begin) : begin + work.length;
    if (end < 0) break;
    stream.ready = end;
    happens(work, stream, begin, end);
  }
  if (stream.pending.empty()) behind().erase(&stream);
  return any;
}

void nap() { usleep(50); }

// Other ranks must see how far this one's streams are although its host does something else.
void keep_up() {
  static auto* there_is_work = new std::condition_variable_any;
  static bool started = false;
  there_is_work->notify_one();
  if (started) return;
  started = true;
  std::thread([] {
    for (;; nap()) {
      std::unique_lock<std::recursive_mutex> guard(lock);
      there_is_work->wait(guard, [] { return !behind().empty(); });
      catch_up();
    }
  }).detach();
}

}  // namespace

int64_t now() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000LL + at.tv_nsec;
}

void sleep_until(int64_t ns) {
  timespec at{ns / 1000000000LL, ns % 1000000000LL};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
  }
}

Stream* stream_of(cudaStream_t handle) {
  uintptr_t number = (uintptr_t)handle;
  return number <= 2 ? default_stream() : (Stream*)handle;
}

void catch_up() {
  for (bool any = true; any;) {
    any = false;
    for (Stream* stream : std::set<Stream*>(behind())) any |= lay_out(*stream);
  }
}

void enqueue(Stream* stream, Work work) {
  Guard guard(lock);
  if (stream->capture) return captured(stream, std::move(work));
  if (work.kind == Work::event && work.record) work.instant = work.record->reached = std::make_shared<Instant>();
  if (work.numbers) work.number = ++*work.numbers;
  work.given = now();
  work.correlation = correlation;
  stream->pending.push_back(std::move(work));
  lay_out(*stream);
  if (!stream->pending.empty()) {
    behind().insert(stream);
    keep_up();
  }
  if (!behind().empty()) catch_up();
}

int64_t end_of(Stream* stream) {
  for (;; nap()) {
    Guard guard(lock);
    catch_up();
    if (stream->pending.empty()) return stream->ready;
  }
}

int64_t end_of(const Instant& instant) {
  for (;; nap()) {
    Guard guard(lock);
    catch_up();
    if (instant.known) return instant.at;
  }
}

cudaError_t waited(Stream* stream) {
  if (stream->capture) return refused(stream);
  wait_until(end_of(stream));
  ALIVE;
  return cudaSuccess;
}

cudaError_t all_waited(bool refuses) {
  std::vector<Stream*> own;
  {
    Guard guard(lock);
    for (Stream* stream : streams) {
      if (stream->device != current_device()) continue;
      if (stream->capture && refuses) return refused(stream);
      own.push_back(stream);
    }
  }
  for (Stream* stream : own) wait_until(end_of(stream));
  ALIVE;
  return cudaSuccess;
}

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaDeviceSynchronize() {
  TOLD;
  return all_waited(true);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ALIVE;
  Guard guard(lock);
  static uint32_t count = 13;
  auto* made = new Stream{};
  made->flags = flags, made->priority = priority, made->id = count++, made->device = current_device();
  streams.insert(made);
  *stream = (cudaStream_t)made;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Guard guard(lock);
  streams.erase((Stream*)stream);
  if (((Stream*)stream)->pending.empty()) delete (Stream*)stream;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  TOLD;
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ALIVE;
  TOLD;
  Guard guard(lock);
  Stream* stream = stream_of(handle);
  if (stream->capture) return refused(stream);
  catch_up();
  return !stream->pending.empty() || stream->ready > now() ? failed(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  TOLD;
  return waited(stream_of(stream));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t given, unsigned flags) {
  TOLD;
  ALIVE;
  Guard guard(lock);
  Stream* stream = stream_of(handle);
  auto* event = (Event*)given;
  if (event->capture || stream->capture) return wait_captured(stream, event, flags & cudaEventWaitExternal);
  if (event->reached) {
    Work work;
    work.kind = Work::wait, work.instant = event->reached;
    enqueue(stream, work);
  }
  return cudaSuccess;
}

#pragma GCC visibility pop
}  // extern "C"
