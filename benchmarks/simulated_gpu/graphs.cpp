// Captures and graphs. A graph is what its streams were given while they captured, each in its order, with the events that
// they waited for; when it is launched, each of them is given that again, but the first, for which the launch's stream stands.
//
// What may not be done during a capture fails, and spoils the capture, as CUDA's documentation of cudaStreamBeginCapture and
// cudaThreadExchangeStreamCaptureMode has it. Not simulated: what changes a graph, or captures the launch of another.
#include <algorithm>
#include <map>
#include <thread>

#include "gpu.h"

namespace gpu {

struct Step {
  Work work;
  size_t branch;
  size_t mark;  // of a wait within the graph: the step that recorded its event
};
struct Graph {
  std::vector<Step> steps;
  std::vector<Stream*> branches;
  size_t nodes = 0;
};
struct Capture : Graph {
  uint64_t id;
  cudaStreamCaptureMode mode;
  std::thread::id thread = std::this_thread::get_id();
  bool spoilt = false;
};

namespace {
std::map<uint64_t, Capture*> ongoing;
thread_local cudaStreamCaptureMode strictness = cudaStreamCaptureModeGlobal;
const size_t no_mark = -1;

cudaError_t spoil(Capture* capture, cudaError_t error) {
  capture->spoilt = true;
  return failed(error);
}

void merge(Seen& into, const Seen& more) {
  into.resize(std::max(into.size(), more.size()));
  for (size_t i = 0; i < more.size(); ++i) into[i] = std::max(into[i], more[i]);
}

void add(Stream* stream, Work work, size_t mark = no_mark) {
  Capture* capture = stream->capture;
  size_t branch = std::find(capture->branches.begin(), capture->branches.end(), stream) - capture->branches.begin();
  capture->steps.push_back({std::move(work), branch, mark});
}
}  // namespace

void captured(Stream* stream, Work work) {
  add(stream, std::move(work));
  const Capture& capture = *stream->capture;
  Seen now(capture.branches.size());
  now[capture.steps.back().branch] = ++stream->capture->nodes;
  merge(stream->seen, now);
}

void record_captured(Stream* stream, Event* event) {  // an order within the graph, nothing that could be read
  Work work;
  work.kind = Work::event;
  add(stream, work);
  event->capture = stream->capture->id;
  event->mark = stream->capture->steps.size() - 1;
  event->seen = stream->seen;
  event->reached = nullptr;
}

cudaError_t wait_captured(Stream* stream, Event* event, bool external) {
  Work work;
  work.kind = Work::wait;
  if (!event->capture && external) return captured(stream, (work.record = event, work)), cudaSuccess;
  if (!event->capture) return event->reached ? spoil(stream->capture, cudaErrorStreamCaptureIsolation) : cudaSuccess;
  auto found = ongoing.find(event->capture);
  if (found == ongoing.end()) return failed(cudaErrorCapturedEvent);
  if (!stream->capture) {  // it joins the capture
    stream->capture = found->second;
    auto& branches = stream->capture->branches;
    if (std::find(branches.begin(), branches.end(), stream) == branches.end()) branches.push_back(stream);
  }
  if (stream->capture != found->second) return spoil(stream->capture, spoil(found->second, cudaErrorStreamCaptureMerge));
  add(stream, work, event->mark);
  merge(stream->seen, event->seen);
  return cudaSuccess;
}

cudaError_t refused(Stream* stream) {
  Guard guard(lock);
  return spoil(stream->capture, cudaErrorStreamCaptureUnsupported);
}

cudaError_t unsafe() {
  Guard guard(lock);
  for (auto& [id, capture] : ongoing) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool anybodys = capture->mode == cudaStreamCaptureModeGlobal && strictness == cudaStreamCaptureModeGlobal;
    if (strictness != cudaStreamCaptureModeRelaxed && (own || anybodys)) return spoil(capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  TOLD;
  Guard guard(lock);
  static uint64_t count = 0;
  if ((uintptr_t)handle <= 1) return failed(cudaErrorStreamCaptureUnsupported);  // the legacy stream
  Stream* stream = stream_of(handle);
  if (stream->capture) return failed(cudaErrorIllegalState);
  stream->capture = new Capture{{{}, {stream}}, ++count, mode};
  ongoing[count] = stream->capture;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  TOLD;
  Guard guard(lock);
  *graph = nullptr;
  Stream* origin = stream_of(handle);
  Capture* capture = origin->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->branches[0] != origin) return spoil(capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return spoil(capture, cudaErrorStreamCaptureWrongThread);
  Seen before_the_end = origin->seen;
  bool unjoined = false;
  before_the_end.resize(capture->branches.size());
  for (size_t i = 0; i < capture->branches.size(); ++i) {
    Stream* stream = capture->branches[i];
    unjoined |= i < stream->seen.size() && stream->seen[i] > before_the_end[i];
    stream->capture = nullptr;
    stream->seen.clear();
  }
  ongoing.erase(capture->id);
  cudaError_t error = capture->spoilt ? cudaErrorStreamCaptureInvalidated : unjoined ? cudaErrorStreamCaptureUnjoined : cudaSuccess;
  if (!error) *graph = (cudaGraph_t) new Graph(*capture);
  delete capture;
  return error ? failed(error) : cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  TOLD;
  Guard guard(lock);
  Capture* capture = stream_of(handle)->capture;
  *status = !capture          ? cudaStreamCaptureStatusNone
            : capture->spoilt ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, size_t* count) {
  TOLD;
  Guard guard(lock);
  Capture* capture = stream_of(handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = (cudaGraph_t) static_cast<Graph*>(capture);
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(handle, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  TOLD;
  std::swap(strictness, *mode);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t given, unsigned long long) {
  TOLD;
  auto* graph = new Graph(*(Graph*)given);
  for (Stream*& branch : graph->branches) {
    auto* own = new Stream{};
    own->id = branch->id, own->device = branch->device;
    branch = own;
  }
  *made = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = ((Graph*)graph)->nodes;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t given, cudaStream_t handle) {
  TOLD;
  Guard guard(lock);
  ALIVE;
  auto* graph = (Graph*)given;
  Stream* stream = stream_of(handle);
  if (stream->capture) return refused(stream);
  std::vector<std::shared_ptr<Instant>> instants;
  for (const Step& step : graph->steps) {
    Work work = step.work;
    if (step.mark != no_mark) work.instant = instants[step.mark];
    else if (work.kind == Work::wait) work.instant = work.record->reached;
    else if (work.kind == Work::event && !work.record) work.instant = std::make_shared<Instant>();
    instants.push_back(work.instant);
    if (work.kind != Work::wait || work.instant) enqueue(step.branch ? graph->branches[step.branch] : stream, std::move(work));
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  TOLD;
  delete (Graph*)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {  // its streams may still have work
  TOLD;
  delete (Graph*)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }

#pragma GCC visibility pop
}  // extern "C"
