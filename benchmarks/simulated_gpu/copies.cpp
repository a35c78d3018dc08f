// Copies and fills, and what a host reads of what kernels never wrote. Copies take the time of the link, and move their bytes
// in the stream's order, as soon as their time is known: a host that does not wait for them sees them too early.
#include <cstring>
#include <map>

#include "gpu.h"

namespace gpu {
namespace {

const double link_per_ns = 50.0;  // bytes

// A single number that is read back is zero, as a kernel left it, unless just that number was copied there or a collective
// wrote it: the allocator gives out blocks again, and what was copied to one once is nothing that a kernel wrote.
const size_t number = 8;
std::map<char*, size_t> numbers;  // their bytes, by where they are
const size_t worth_moving = 1 << 16;  // from device to device

void moved(void* to, const void* from, size_t bytes, bool from_device, bool to_device) {
  Guard guard(lock);
  char *target = (char*)to, *source = (char*)from;
  size_t told = 0;  // of a pair of int32 a collective wrote each
  for (auto at = numbers.lower_bound(source); at != numbers.end() && at->first < source + bytes; ++at) told += at->second;
  bool written = !from_device || bytes > number || told == bytes;
  if (to_device) {
    std::map<char*, size_t> known;
    if (!from_device && bytes <= number) known[target] = bytes;
    for (auto at = numbers.lower_bound(source); from_device && at != numbers.end() && at->first < source + bytes; ++at)
      known[target + (at->first - source)] = at->second;
    numbers.erase(numbers.lower_bound(target), numbers.lower_bound(target + bytes));
    numbers.insert(known.begin(), known.end());
    if (from_device && bytes > worth_moving) return;  // what kernels never wrote is not worth a copy
  }
  if (written) memmove(to, from, bytes);
  else memset(to, 0, bytes);
}

// The driver's command buffer takes so many bytes of pageable memory, for which nobody waits.
const size_t within_the_command = 64 << 10;
cudaError_t copied(void* to, const void* from, size_t bytes, cudaStream_t handle, bool waits) {
  ALIVE;
  Stream* stream = stream_of(handle);
  Work work;
  {
    Guard guard(lock);
    work.from = memory_kind(from), work.to = memory_kind(to);
  }
  bool from_device = work.from == 3, to_device = work.to == 3, pinned = work.from != 1 && work.to != 1;
  work.kind = Work::copy;
  work.bytes = bytes;
  work.copy_kind = from_device && to_device ? 8 : from_device ? 2 : to_device ? 1 : 9;  // CUpti_ActivityMemcpyKind
  work.length = start_of_kernel + (from_device && to_device ? 2 * bytes / memory_per_ns : bytes / link_per_ns);
  bool within_a_command = work.from == 1 && to_device && bytes <= within_the_command;
  if (within_a_command)
    work.moves = [=, kept = std::vector<char>((const char*)from, (const char*)from + bytes)] { moved(to, kept.data(), bytes, false, true); };
  else
    work.moves = [=] { moved(to, from, bytes, from_device, to_device); };
  enqueue(stream, std::move(work));
  // Of pageable memory the call comes back once the bytes are away: they go through a buffer of CUDA's own.
  waits |= !pinned && !stream->capture && !within_a_command;
  return waits ? waited(stream) : cudaSuccess;
}

}  // namespace

void read_memory(void* into, const void* from, size_t bytes) { moved(into, from, bytes, true, false); }
void wrote_memory(void* at, size_t count, size_t each) {
  Guard guard(lock);
  for (size_t i = 0; i < count; ++i) numbers[(char*)at + i * each] = each;
}

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  TOLD;
  return copied(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  TOLD;
  return copied(to, from, bytes, nullptr, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  TOLD;
  return copied(to, from, bytes, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  TOLD;
  for (size_t row = 0; row + 1 < height; ++row) memcpy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return height ? copied((char*)to + (height - 1) * to_pitch, (const char*)from + (height - 1) * from_pitch, width, stream, false)
                : cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  TOLD;
  ALIVE;
  Work work;
  if (bytes <= 4096) work.moves = [=] { memset(at, value, bytes); };  // a counter, a flag; large blocks are not worth their pages
  work.kind = Work::fill, work.bytes = bytes, work.length = start_of_kernel + bytes / memory_per_ns;
  enqueue(stream_of(stream), work);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  TOLD;
  return cudaMemsetAsync(at, value, bytes, nullptr);
}

#pragma GCC visibility pop
}  // extern "C"
