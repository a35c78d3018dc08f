// CUPTI's activity: records of calls and of the device's work, in buffers that the profiler gives and gets back.
//
// In a buffer times are ns of the device's clock; when it is handed over they become those of the profiler's.
#include <cupti.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "gpu.h"

namespace gpu {

thread_local uint32_t correlation = 0;

namespace {

std::recursive_mutex telling;  // guards what follows; taken after `lock`, where both are
std::atomic<bool> enabled[CUPTI_ACTIVITY_KIND_COUNT];
CUpti_BuffersCallbackRequestFunc requested = nullptr;
CUpti_BuffersCallbackCompleteFunc completed = nullptr;
size_t dropped = 0;

struct Buffer {
  uint8_t* at = nullptr;
  size_t size = 0, used = 0;
  int64_t last = 0;  // when all that it tells of is done
};
std::deque<Buffer> buffers;  // the last one is written to

// The profiler's clock, read where it was given and now: between the two it is even.
uint64_t wall() {
  timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  return at.tv_sec * 1000000000ULL + at.tv_nsec;
}
CUpti_TimestampCallbackFunc profilers_clock = wall;
struct Moment {
  int64_t ns;
  uint64_t theirs;
};
Moment moment() {  // of several readings the one that took least
  Moment best{};
  for (int64_t attempt = 0, least = INT64_MAX; attempt < 32; ++attempt) {
    int64_t before = now();
    uint64_t theirs = profilers_clock();
    int64_t took = now() - before;
    if (took < least) least = took, best = {before + took / 2, theirs};
  }
  return best;
}
Moment origin = moment();

size_t size_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return sizeof(CUpti_ActivityKernel10);
    case CUPTI_ACTIVITY_KIND_MEMCPY: return sizeof(CUpti_ActivityMemcpy6);
    case CUPTI_ACTIVITY_KIND_MEMSET: return sizeof(CUpti_ActivityMemset4);
    case CUPTI_ACTIVITY_KIND_RUNTIME: case CUPTI_ACTIVITY_KIND_DRIVER: return sizeof(CUpti_ActivityAPI);
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return sizeof(CUpti_ActivityExternalCorrelation);
    default: abort();
  }
}

template <class Record>
void convert(uint8_t* at, int64_t since, long double rate, int64_t until) {
  auto* record = (Record*)at;
  bool done = (int64_t)record->end <= until;  // without, CUPTI knows neither
  for (auto* time : {&record->start, &record->end}) *time = done ? origin.theirs + (uint64_t)(((int64_t)*time - since) * rate) : 0;
}

void hand_over(bool forced) {
  Moment read = moment();
  long double rate = (long double)(read.theirs - origin.theirs) / (read.ns - origin.ns);
  std::deque<Buffer> kept;
  for (Buffer& buffer : buffers) {
    if (buffer.last > read.ns && !forced) {
      kept.push_back(buffer);
      continue;
    }
    for (size_t at = 0; at < buffer.used;) {
      uint8_t* record = buffer.at + at;
      auto kind = ((CUpti_Activity*)record)->kind;
      if (kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) convert<CUpti_ActivityKernel10>(record, origin.ns, rate, read.ns);
      else if (kind == CUPTI_ACTIVITY_KIND_MEMCPY) convert<CUpti_ActivityMemcpy6>(record, origin.ns, rate, read.ns);
      else if (kind == CUPTI_ACTIVITY_KIND_MEMSET) convert<CUpti_ActivityMemset4>(record, origin.ns, rate, read.ns);
      else if (kind != CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) convert<CUpti_ActivityAPI>(record, origin.ns, rate, read.ns);
      at += size_of(kind);
    }
    completed(nullptr, 0, buffer.at, buffer.size, buffer.used);
  }
  buffers = kept;
}

template <class Record>
void keep(const Record& record, int64_t done) {
  static_assert(sizeof record % ACTIVITY_RECORD_ALIGNMENT == 0, "records follow each other without a gap");
  if (buffers.empty() || buffers.back().used + sizeof record > buffers.back().size) {
    if (!requested) return;
    if (!buffers.empty()) hand_over(false);
    Buffer made;
    size_t most = 0;
    requested(&made.at, &made.size, &most);
    if (made.size < sizeof record) {
      ++dropped;
      return;
    }
    buffers.push_back(made);
  }
  Buffer& buffer = buffers.back();
  memcpy(buffer.at + buffer.used, &record, sizeof record);
  buffer.used += sizeof record;
  buffer.last = std::max(buffer.last, done);
}

struct Call {
  CUpti_ActivityKind kind;
  CUpti_CallbackId number;
};
const std::unordered_map<std::string, Call>& calls() {
#define RUNTIME(name, version) {#name, {CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_RUNTIME_TRACE_CBID_##name##_##version}}
#define DRIVER(name) {#name, {CUPTI_ACTIVITY_KIND_DRIVER, CUPTI_DRIVER_TRACE_CBID_##name}}
  static const auto* known = new std::unordered_map<std::string, Call>{
      RUNTIME(__cudaLaunchKernel, v13000), RUNTIME(cudaLaunchKernel, v7000), RUNTIME(cudaLaunchKernelExC, v11060),
      RUNTIME(cudaLaunchCooperativeKernel, v9000), RUNTIME(cudaLaunchHostFunc, v10000), RUNTIME(cudaStreamAddCallback, v5000),
      RUNTIME(cudaFuncGetAttributes, v3020), RUNTIME(cudaFuncSetAttribute, v9000),
      RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessor, v6050),
      RUNTIME(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, v7000), RUNTIME(cudaDeviceSynchronize, v3020),
      RUNTIME(cudaMalloc, v3020), RUNTIME(cudaFree, v3020), RUNTIME(cudaMallocAsync, v11020), RUNTIME(cudaFreeAsync, v11020),
      RUNTIME(cudaHostAlloc, v3020), RUNTIME(cudaFreeHost, v3020), RUNTIME(cudaHostRegister, v4000),
      RUNTIME(cudaHostUnregister, v4000), RUNTIME(cudaPointerGetAttributes, v4000), RUNTIME(cudaMemGetInfo, v3020),
      RUNTIME(cudaMemcpyAsync, v3020), RUNTIME(cudaMemcpy, v3020), RUNTIME(cudaMemcpyPeerAsync, v4000),
      RUNTIME(cudaMemcpy2DAsync, v3020), RUNTIME(cudaMemsetAsync, v3020), RUNTIME(cudaMemset, v3020),
      RUNTIME(cudaStreamSynchronize, v3020), RUNTIME(cudaStreamQuery, v3020), RUNTIME(cudaStreamWaitEvent, v3020),
      RUNTIME(cudaStreamGetPriority, v5050), RUNTIME(cudaEventRecord, v3020), RUNTIME(cudaEventRecordWithFlags, v11010),
      RUNTIME(cudaEventQuery, v3020), RUNTIME(cudaEventSynchronize, v3020), RUNTIME(cudaEventElapsedTime, v12080),
      RUNTIME(cudaStreamBeginCapture, v10000), RUNTIME(cudaStreamEndCapture, v10000), RUNTIME(cudaStreamIsCapturing, v10000),
      RUNTIME(cudaStreamGetCaptureInfo, v12030), RUNTIME(cudaThreadExchangeStreamCaptureMode, v10010),
      RUNTIME(cudaGraphInstantiateWithFlags, v11040), RUNTIME(cudaGraphLaunch, v10000), RUNTIME(cudaGraphDestroy, v10000),
      RUNTIME(cudaGraphExecDestroy, v10000), DRIVER(cuLaunchKernel), DRIVER(cuLaunchKernelEx), DRIVER(cuLaunchCooperativeKernel),
  };
#undef RUNTIME
#undef DRIVER
  return *known;
}

// What a thread's calls belong to, as the profiler says; told before a call's first record.
thread_local std::map<CUpti_ExternalCorrelationKind, std::vector<uint64_t>> external;
void tell_external(uint32_t correlation) {
  static thread_local uint32_t told = 0;
  if (correlation != gpu::correlation) return;  // of an earlier call: its work had to wait for another rank
  if (told == correlation || !enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) return;
  told = correlation;
  for (auto& [kind, ids] : external)
    if (!ids.empty()) keep(CUpti_ActivityExternalCorrelation{CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION, kind, ids.back(), correlation, 0}, 0);
}

const char* kept_name(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>;
  return names->insert(name).first->c_str();
}

// What Kineto and CUPTI are held against: every work as it was given its time.
void write_down(const Work& work, const Stream& stream, int64_t begin, int64_t end, uint32_t correlation) {
  static FILE* file = [] {
    const char* path = getenv("SIMULATED_GPU_WORK");
    FILE* opened = path && *path ? fopen(path, "a") : nullptr;
    if (opened) setvbuf(opened, nullptr, _IOLBF, 1 << 16);
    return opened;
  }();
  if (!file) return;
  const char* kinds[] = {"kernel", "copy", "fill"};
  fprintf(file, "%d\t%u\t%u\t%ld\t%ld\t%s\t%s\n", getpid(), correlation, stream.id, begin, end - begin, kinds[work.kind], work.name.c_str());
}

}  // namespace

uint32_t next_correlation() {
  static std::atomic<uint32_t> count{1};
  return count++;
}

void tell_call(const char* function, int64_t begin, int64_t end, uint32_t correlation) {
  if (!enabled[CUPTI_ACTIVITY_KIND_RUNTIME] && !enabled[CUPTI_ACTIVITY_KIND_DRIVER]) return;
  auto found = calls().find(function);
  if (found == calls().end() || !enabled[found->second.kind]) return;
  Guard guard(telling);
  tell_external(correlation);
  CUpti_ActivityAPI record{};
  record.kind = found->second.kind, record.cbid = found->second.number;
  record.start = begin, record.end = end;
  record.processId = getpid(), record.threadId = (uint32_t)pthread_self(), record.correlationId = correlation;
  keep(record, end);
}

template <class Record>
void tell_done(Record record, CUpti_ActivityKind kind, const Stream& stream, int64_t begin, int64_t end, uint32_t correlation) {
  if (!enabled[kind]) return;
  Guard guard(telling);
  tell_external(correlation);
  record.kind = kind, record.start = begin, record.end = end;
  record.deviceId = stream.device, record.contextId = 1 + stream.device, record.streamId = stream.id, record.correlationId = correlation;
  keep(record, end);
}

void tell_work(const Work& work, const Stream& stream, int64_t begin, int64_t end, uint32_t correlation) {
  write_down(work, stream, begin, end, correlation);
  if (work.kind == Work::kernel) {
    CUpti_ActivityKernel10 record{};
    record.name = kept_name(work.name);
    record.gridX = work.grid.x, record.gridY = work.grid.y, record.gridZ = work.grid.z;
    record.blockX = work.block.x, record.blockY = work.block.y, record.blockZ = work.block.z;
    record.registersPerThread = 32;
    tell_done(record, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, stream, begin, end, correlation);
  } else if (work.kind == Work::copy) {
    CUpti_ActivityMemcpy6 record{};
    record.copyKind = work.copy_kind, record.srcKind = work.from, record.dstKind = work.to;
    record.bytes = work.bytes;
    tell_done(record, CUPTI_ACTIVITY_KIND_MEMCPY, stream, begin, end, correlation);
  } else if (work.kind == Work::fill) {
    CUpti_ActivityMemset4 record{};
    record.bytes = work.bytes, record.memoryKind = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    tell_done(record, CUPTI_ACTIVITY_KIND_MEMSET, stream, begin, end, correlation);
  }
}
}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)
CUptiResult cuptiGetVersion(uint32_t* version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult, const char** text) { return *text = "an error of the simulated GPU", CUPTI_SUCCESS; }
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  *subscriber = (CUpti_SubscriberHandle)1;  // calls are not told as they are made
  return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) { return CUPTI_SUCCESS; }
CUptiResult cuptiFinalize() { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableDomain(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain) { return CUPTI_SUCCESS; }
CUptiResult cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain, CUpti_CallbackId) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request, CUpti_BuffersCallbackCompleteFunc complete) {
  Guard guard(telling);
  requested = request, completed = complete;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) {
  Guard guard(telling);
  profilers_clock = clock, origin = moment();
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: case CUPTI_ACTIVITY_KIND_MEMCPY: case CUPTI_ACTIVITY_KIND_MEMSET:
    case CUPTI_ACTIVITY_KIND_RUNTIME: case CUPTI_ACTIVITY_KIND_DRIVER: case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION:
    case CUPTI_ACTIVITY_KIND_OVERHEAD:  // of which there is none
      enabled[kind] = true;
      return CUPTI_SUCCESS;
    default: return CUPTI_ERROR_NOT_SUPPORTED;
  }
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
  if (kind < CUPTI_ACTIVITY_KIND_COUNT) enabled[kind] = false;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityFlushAll(uint32_t flag) {
  Guard guard(telling);
  hand_over(flag & CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t* buffer, size_t valid, CUpti_Activity** record) {
  uint8_t* next = *record ? (uint8_t*)*record + size_of((*record)->kind) : buffer;
  if (next >= buffer + valid) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = (CUpti_Activity*)next;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* count) {
  Guard guard(telling);
  *count = dropped, dropped = 0;
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t id) {
  external[kind].push_back(id);
  return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind, uint64_t* last) {
  auto& ids = external[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  ids.pop_back();
  return CUPTI_SUCCESS;
}
#pragma GCC visibility pop
}  // extern "C"
