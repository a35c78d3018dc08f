// Devices: which there are, what they are called and can, and which of them a thread calls.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gpu.h"

namespace gpu {
namespace {

thread_local int current = 0;

// The machine's cards that CUDA_VISIBLE_DEVICES leaves this process.
const std::vector<int>& cards() {
  static const auto* seen = [] {
    auto* found = new std::vector<int>;
    int count = std::min(16.0, setting("SIMULATED_GPU_COUNT", 1));
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !text && i < count; ++i) found->push_back(i);
    for (char* after; text && *text; text = *after ? after + 1 : after) {
      long number = strtol(text, &after, 10);
      if (after == text || number < 0 || number >= count) break;  // and nothing after it
      found->push_back(number);
    }
    return found;
  }();
  return *seen;
}

}  // namespace

double setting(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}

int devices() { return cards().size(); }
int card(int device) { return cards()[device]; }
int current_device() { return current; }

const char* device_name() {
  const char* name = getenv("SIMULATED_GPU_NAME");
  return name && *name ? name : "NVIDIA H100 80GB HBM3 (simulated)";
}
int capability(bool minor) {
  int tenths = int(setting("SIMULATED_GPU_CAPABILITY", 9.0) * 10 + 0.5);
  return minor ? tenths % 10 : tenths / 10;
}
int device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrClockRate: return int(cycles_per_ns * 1e6);  // kHz
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrComputeCapabilityMajor: return capability(false);
    case cudaDevAttrComputeCapabilityMinor: return capability(true);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrCanMapHostMemory: case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrHostRegisterSupported: return 1;
    case 102: return 1;  // virtual memory management
    default: return 0;
  }
}

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaGetDeviceCount(int* count) {
  *count = devices();
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return devices() ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= devices()) return failed(devices() ? cudaErrorInvalidDevice : cudaErrorNoDevice);
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int of, int other) {
  *can = of != other;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:00:%02x.0", 5 + card(device));
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= devices()) return failed(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device_name());
  for (int i = 0; i < 16; ++i) p->uuid.bytes[i] = char(0x51 + i + (i == 15 ? card(device) : 0));
  p->totalGlobalMem = capacity;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = capability(false), p->minor = capability(true);
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->unifiedAddressing = p->managedMemory = p->concurrentKernels = p->canMapHostMemory = 1;
  p->pciBusID = 0, p->pciDeviceID = 5 + card(device);
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 52428800;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->sharedMemPerBlockOptin = 232448;
  p->reservedSharedMemPerBlock = 1024;
  p->cooperativeLaunch = 1;
  p->maxBlocksPerMultiProcessor = 32;
  p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrPciDeviceId ? 5 + card(device) : device_attribute(attribute);
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

#pragma GCC visibility pop
}  // extern "C"
