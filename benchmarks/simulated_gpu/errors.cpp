// Errors: the last one of each thread's calls, and that of a device that failed an assertion.
#include <algorithm>
#include <atomic>

#include "gpu.h"

namespace gpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
// When a kernel failed an assertion. The host hears of it at any call after the kernel's end, for good.
std::atomic<int64_t> fails_at{INT64_MAX};

}  // namespace

cudaError_t broken() { return now() < fails_at ? cudaSuccess : cudaErrorAssert; }
cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}
void fail_at(int64_t ns) {
  Guard guard(lock);
  fails_at = std::min(fails_at.load(), ns);
}
void wait_until(int64_t ns) { sleep_until(std::min(ns, fails_at.load())); }

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaGetLastError() {
  cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return broken() ? broken() : last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorAssert: return "cudaErrorAssert";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorNotSupported: return "operation not supported";
    default: return "an error of the simulated GPU";
  }
}

#pragma GCC visibility pop
}  // extern "C"
