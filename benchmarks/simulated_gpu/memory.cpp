// Memory: a block is an address range that costs nothing until it is written to, and kernels write nothing.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "gpu.h"

namespace gpu {

const uint64_t capacity = setting("SIMULATED_GPU_GIB", 79.11) * (1ULL << 30);
const uint64_t held_by_others = setting("SIMULATED_GPU_OTHERS_GIB", 0) * (1ULL << 30);  // by another process

namespace {

const uint64_t held_by_the_context = 500ULL << 20;
struct Block {
  uint64_t bytes;
  int device = 0;
};
std::map<char*, Block> device_memory, host_memory;  // by their beginning
uint64_t used[16];  // of each device, beside what its context and another process hold
// A device's own pool of memory, without gaps: it grows by whole pieces, and keeps them until it is trimmed.
struct Pool {
  uint64_t used = 0, reserved = 0, most_used = 0, most_reserved = 0;
  static uint64_t whole(uint64_t bytes) { return (bytes + (32ULL << 20) - 1) & ~((32ULL << 20) - 1); }
  void hold(uint64_t now_used, uint64_t now_reserved) {
    used = now_used, reserved = now_reserved;
    most_used = std::max(most_used, used), most_reserved = std::max(most_reserved, reserved);
  }
} pools[16];

const Block* block_of(const std::map<char*, Block>& memory, const void* at) {
  auto after = memory.upper_bound((char*)at);
  if (after == memory.begin()) return nullptr;
  --after;
  return (char*)at < after->first + after->second.bytes ? &after->second : nullptr;
}
bool within(const std::map<char*, Block>& memory, const void* at) { return block_of(memory, at); }

}  // namespace

uint64_t memory_used(int device) { return held_by_the_context + held_by_others + used[device]; }
bool has_memory(int device) { return used[device]; }
bool take_memory(uint64_t bytes, int device) {
  Guard guard(lock);
  if (memory_used(device) + bytes > capacity) return false;
  used[device] += bytes;
  return true;
}
void give_memory(uint64_t bytes, int device) {
  Guard guard(lock);
  used[device] -= bytes;
}
void map_memory(void* at, uint64_t bytes, int device) {
  Guard guard(lock);
  device_memory[(char*)at] = {bytes, device};
}
void unmap_memory(void* at) {
  Guard guard(lock);
  device_memory.erase((char*)at);
}
int memory_kind(const void* at) { return within(device_memory, at) ? 3 : within(host_memory, at) ? 2 : 1; }

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaMalloc(void** at, size_t bytes) {
  TOLD;
  Guard guard(lock);
  if (cudaError_t error = unsafe()) return error;
  ALIVE;
  *at = nullptr;
  if (!bytes) return cudaSuccess;
  uint64_t rounded = (bytes + (2ULL << 20) - 1) & ~((2ULL << 20) - 1);
  if (!take_memory(rounded, current_device())) return failed(cudaErrorMemoryAllocation);
  void* block = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  device_memory[(char*)block] = {rounded, current_device()};
  *at = block;
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  TOLD;
  ALIVE;
  if (!at) return cudaSuccess;
  if (cudaError_t error = unsafe()) return error;
  all_waited(false);
  Guard guard(lock);
  auto found = device_memory.find((char*)at);
  if (found == device_memory.end()) return failed(cudaErrorInvalidValue);
  munmap(at, found->second.bytes);
  give_memory(found->second.bytes, found->second.device);
  device_memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) {
  TOLD;
  Guard guard(lock);
  ALIVE;
  *at = nullptr;
  if (!bytes) return cudaSuccess;
  bytes = (bytes + 511) & ~511ULL;
  Pool& pool = pools[current_device()];
  uint64_t reserved = std::max(pool.reserved, Pool::whole(pool.used + bytes));
  if (!take_memory(reserved - pool.reserved, current_device())) return failed(cudaErrorMemoryAllocation);
  pool.hold(pool.used + bytes, reserved);
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  device_memory[(char*)block] = {bytes, current_device()};
  *at = block;
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* at, cudaStream_t) {
  TOLD;
  Guard guard(lock);
  ALIVE;
  auto found = device_memory.find((char*)at);
  if (found == device_memory.end()) return failed(cudaErrorInvalidValue);
  madvise(at, found->second.bytes, MADV_DONTNEED);  // its addresses stay: works of the stream, and graphs, may yet come to them
  Pool& pool = pools[found->second.device];
  pool.hold(pool.used - found->second.bytes, pool.reserved);
  device_memory.erase(found);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* told, int device) {
  *told = (cudaMemPool_t)&pools[device];
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t of, size_t least) {
  Guard guard(lock);
  Pool& pool = *(Pool*)of;
  uint64_t kept = std::min(pool.reserved, Pool::whole(std::max<uint64_t>(least, pool.used)));
  give_memory(pool.reserved - kept, int(&pool - pools));
  pool.hold(pool.used, kept);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t of, cudaMemPoolAttr which, void*) {
  Guard guard(lock);
  Pool& pool = *(Pool*)of;
  if (which == cudaMemPoolAttrReservedMemHigh) pool.most_reserved = pool.reserved;
  if (which == cudaMemPoolAttrUsedMemHigh) pool.most_used = pool.used;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t of, cudaMemPoolAttr which, void* told) {
  Guard guard(lock);
  Pool& pool = *(Pool*)of;
  auto& value = *(uint64_t*)told;
  switch (which) {
    case cudaMemPoolAttrReservedMemCurrent: value = pool.reserved; return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh: value = pool.most_reserved; return cudaSuccess;
    case cudaMemPoolAttrUsedMemCurrent: value = pool.used; return cudaSuccess;
    case cudaMemPoolAttrUsedMemHigh: value = pool.most_used; return cudaSuccess;
    default: return failed(cudaErrorNotSupported);
  }
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ALIVE;
  TOLD;
  Guard guard(lock);
  *free = capacity - memory_used(current_device()), *total = capacity;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  ALIVE;
  TOLD;
  Guard guard(lock);
  if (cudaError_t error = unsafe()) return error;
  if (posix_memalign(at, 4096, std::max<size_t>(bytes, 1))) return failed(cudaErrorMemoryAllocation);
  host_memory[(char*)*at] = {bytes};
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* at) {
  TOLD;
  Guard guard(lock);
  if (cudaError_t error = unsafe()) return error;
  host_memory.erase((char*)at);
  free(at);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) {
  TOLD;
  Guard guard(lock);
  host_memory[(char*)at] = {bytes};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* at) {
  TOLD;
  Guard guard(lock);
  host_memory.erase((char*)at);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  TOLD;
  Guard guard(lock);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = within(device_memory, at) ? cudaMemoryTypeDevice
                     : within(host_memory, at) ? cudaMemoryTypeHost
                                               : cudaMemoryTypeUnregistered;
  if (const Block* block = block_of(device_memory, at)) attributes->device = block->device;
  attributes->devicePointer = attributes->type == cudaMemoryTypeUnregistered ? nullptr : (void*)at;
  attributes->hostPointer = attributes->type == cudaMemoryTypeDevice ? nullptr : (void*)at;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** at, const void*) {
  static void* variables = calloc(1, 1 << 20);
  *at = variables;
  return cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

#pragma GCC visibility pop
}  // extern "C"
