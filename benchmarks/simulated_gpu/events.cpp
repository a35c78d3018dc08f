// Events: when a stream has come to them, and the time between two.
#include "gpu.h"

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ALIVE;
  auto* made = new Event{};
  made->timed = !(flags & cudaEventDisableTiming);
  *event = (cudaEvent_t)made;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  ALIVE;
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t given, cudaStream_t handle, unsigned flags) {
  TOLD;
  Guard guard(lock);
  ALIVE;
  auto* event = (Event*)given;
  Stream* stream = stream_of(handle);
  if (stream->capture && !(flags & cudaEventRecordExternal)) {
    record_captured(stream, event);
    return cudaSuccess;
  }
  event->capture = 0;
  Work work;
  work.kind = Work::event, work.record = event;
  enqueue(stream, work);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  TOLD;
  return cudaEventRecordWithFlags(event, stream, 0);
}
// Whether it is so by now; an event that nobody recorded is.
static bool reached(const Event& event) {
  catch_up();
  return !event.reached || (event.reached->known && event.reached->at <= now());
}
cudaError_t cudaEventQuery(cudaEvent_t given) {
  TOLD;
  Guard guard(lock);
  auto* event = (Event*)given;
  ALIVE;
  if (event->capture) return failed(cudaErrorCapturedEvent);
  if (cudaError_t error = unsafe()) return error;
  return reached(*event) ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t given) {
  TOLD;
  auto* event = (Event*)given;
  if (event->capture) return failed(cudaErrorCapturedEvent);
  if (cudaError_t error = unsafe()) return error;
  std::shared_ptr<Instant> instant;
  {
    Guard guard(lock);
    instant = event->reached;
  }
  if (instant) wait_until(end_of(*instant));
  ALIVE;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  ALIVE;
  TOLD;
  auto *first = (Event*)begin, *second = (Event*)end;
  Guard guard(lock);
  if (!first->timed || !second->timed || !first->reached || !second->reached) return failed(cudaErrorInvalidResourceHandle);
  if (!reached(*first) || !reached(*second)) return failed(cudaErrorNotReady);
  *ms = float((second->reached->at - first->reached->at) / 1e6);
  return cudaSuccess;
}

#pragma GCC visibility pop
}  // extern "C"
