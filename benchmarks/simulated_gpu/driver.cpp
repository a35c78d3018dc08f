// The CUDA driver's functions that PyTorch and Triton ask for, of the same device.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "gpu.h"

using namespace gpu;

namespace {
struct Function {
  char name[256];
};
struct Allocation {
  size_t bytes;
  int device;
};
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = devices();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  snprintf(name, length, "%s", device_name());
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) {
  *bytes = capacity;
  return CUDA_SUCCESS;
}
static char contexts[16];  // of each device
CUresult cuCtxGetCurrent(CUcontext* current) {
  *current = (CUcontext)&contexts[current_device()];
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return context ? (CUresult)cudaSetDevice((char*)context - contexts) : CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  *value = limit == CU_LIMIT_PRINTF_FIFO_SIZE ? 1 << 20 : 0;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  *uuid = properties.uuid;
  return (CUresult)error;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* retained, CUdevice device) {
  *retained = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = (CUmodule) new char;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(module, image); }
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  auto* made = new Function;
  snprintf(made->name, sizeof made->name, "%s", name);
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
  *blocks = 2;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = 66;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                        CUstream stream, void**, void**) {
  Told told(__func__);
  Work work;
  work.name = ((Function*)function)->name;
  work.grid = dim3(gx, gy, gz), work.block = dim3(bx, by, bz);
  work.length = start_of_kernel + double(gx) * gy * gz * bx * by * bz * 32 / memory_per_ns;
  return (CUresult)launch(stream_of((cudaStream_t)stream), std::move(work));  // an error has one number in both
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra) {
  Told told(__func__);
  return cuLaunchKernel(function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes,
                        c->hStream, arguments, extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                   unsigned shared, CUstream stream, void** arguments) {
  Told told(__func__);
  return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, nullptr);
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the simulated GPU";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** text) { return cuGetErrorString(CUDA_SUCCESS, text); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr at) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)value = at;
  else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)value = CU_MEMORYTYPE_DEVICE;
  else memset(value, 0, 4);
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr at) {
  for (unsigned i = 0; i < count; ++i) cuPointerGetAttribute(values[i], attributes[i], at);
  return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream, CUcontext* of) { return cuCtxGetCurrent(of); }
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

// Virtual memory, which the allocator's expandable segments take: addresses first, then what lies behind them.
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  *at = (CUdeviceptr)block;
  return block == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  munmap((void*)at, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* of, unsigned long long) {
  if (!take_memory(bytes, of->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle) new Allocation{bytes, of->location.id};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  auto* made = (Allocation*)handle;
  give_memory(made->bytes, made->device);
  delete made;
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  map_memory((void*)at, bytes, ((Allocation*)handle)->device);
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  unmap_memory((void*)at);
  madvise((void*)at, bytes, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 << 20;
  return CUDA_SUCCESS;
}

// Where the runtime is asked for the driver's functions.
static int not_there() {
  fputs("simulated GPU: a function of the driver is not there\n", stderr);
  return cudaErrorNotSupported;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  std::string versioned = std::string(symbol) + "_v2";
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (!*function) *function = dlsym(RTLD_DEFAULT, versioned.c_str());
  if (!*function) *function = (void*)not_there;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#pragma GCC visibility pop
}  // extern "C"
