// NCCL as PyTorch calls it, between processes of one machine: a rank leaves a collective when those have come that it needs.
//
// Where a rank's stream has come to a collective, it writes when into memory that all ranks share. There the collective ends
// when the last one that it needs has come and the bytes have had their time over NVLink: all ranks, or, as NCCL's rings
// go, of a broadcast those from the root on. What a rank sends in 64 KiB or less is moved as well: counts, shapes, flags.
// Reductions of integers and of float32 and float64 are computed.
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "gpu.h"

using namespace gpu;

namespace {

const double nvlink_per_ns = 350.0;  // bytes, what an all-reduce of eight H100 moves of a buffer
const size_t worth_moving = 1 << 16;
const int turns = 8;  // how far a root may be ahead, as the steps of NCCL's buffers

// One rank's, in one collective: the `number`th, when it has come.
struct Place {
  std::atomic<uint64_t> number;
  int64_t at;
  char bytes[worth_moving];
};
struct Shared {
  std::atomic<int> joined;
  std::atomic<uint64_t> left[64];  // by rank: the last collective that it has left
  Place places[];
};

struct Communicator {
  std::string name;
  int ranks, rank;
  Shared* shared;
  uint64_t given = 0, done = 0, asked = 0;  // collectives, and what the hosts ask each other
  int64_t ready = 0;
  std::atomic<bool> aborted{false};

  // The last ones are for hosts, which wait for each other: nobody comes to the third before all have read the first.
  Place& place(uint64_t number, int of, bool hosts = false) {
    return shared->places[(hosts ? turns + number % 2 : number % turns) * ranks + of];
  }
};

void nap() { usleep(100); }

ncclResult_t join(const std::string& name, int ranks, int rank, ncclComm_t* made) {
  size_t bytes = sizeof(Shared) + (turns + 2) * ranks * sizeof(Place);
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  auto* shared = (Shared*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return ncclSystemError;
  if (++shared->joined == ranks) shm_unlink(name.c_str());
  while (shared->joined < ranks) nap();
  *made = (ncclComm_t) new Communicator{name, ranks, rank, shared};
  return ncclSuccess;
}

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

template <class Number>
void reduce_as(Communicator& of, uint64_t number, size_t from, size_t count, ncclRedOp_t how, Number* into) {
  for (size_t i = 0; i < count; ++i) {
    for (int rank = 0; rank < of.ranks; ++rank) {
      Number next = ((Number*)of.place(number, rank).bytes)[from + i], &so_far = into[i];
      so_far = rank == 0 ? next : how == ncclMax ? std::max(so_far, next) : how == ncclMin ? std::min(so_far, next)
                                : how == ncclProd ? so_far * next : so_far + next;
    }
    if (how == ncclAvg) into[i] /= of.ranks;
  }
}
void reduce(Communicator& of, uint64_t number, size_t from, size_t count, ncclDataType_t type, ncclRedOp_t how, void* into) {
  switch (type) {
    case ncclInt8: return reduce_as(of, number, from, count, how, (int8_t*)into);
    case ncclUint8: return reduce_as(of, number, from, count, how, (uint8_t*)into);
    case ncclInt32: return reduce_as(of, number, from, count, how, (int32_t*)into);
    case ncclInt64: return reduce_as(of, number, from, count, how, (int64_t*)into);
    case ncclFloat32: return reduce_as(of, number, from, count, how, (float*)into);
    case ncclFloat64: return reduce_as(of, number, from, count, how, (double*)into);
    default: return;  // as kernels do, it writes nothing
  }
}

// `send` bytes go from this rank; `receive` writes `count` numbers of `each` bytes, from what others sent in the collective
// of that number. Of the ring this rank needs those from `first` up to itself.
ncclResult_t meet(const char* kernel, ncclComm_t handle, cudaStream_t stream, const void* from, size_t send, size_t over_the_link,
                  void* to, size_t count, size_t each, std::function<void(Communicator&, uint64_t)> receive, int first = -1) {
  auto* of = (Communicator*)handle;
  if (first < 0) first = of->rank + 1;
  Told told("cudaLaunchKernelExC");
  Work work;
  work.name = std::string("ncclDevKernel_") + kernel + "(ncclDevKernelArgsStorage<4096ul>)";
  work.grid = dim3(24), work.block = dim3(544);
  work.length = 5000 + over_the_link / nvlink_per_ns;
  work.numbers = &of->given;
  work.meets = [=, length = work.length](uint64_t number, int64_t& begin) -> int64_t {
    if (of->aborted) return begin;
    if (number != of->done + 1) return -1;  // one after another, on whichever streams
    for (int rank = 0; rank < of->ranks; ++rank)
      if (of->shared->left[rank] + turns < number) return -1;
    begin = std::max(begin, of->ready);
    Place& own = of->place(number, of->rank);
    if (own.number != number) {
      if (from && send <= worth_moving) read_memory(own.bytes, from, send);
      own.at = begin;
      own.number = number;
    }
    int64_t last = begin;
    for (int rank = first % of->ranks; rank != of->rank; rank = (rank + 1) % of->ranks) {
      Place& place = of->place(number, rank);
      if (place.number != number) return -1;
      last = std::max(last, place.at);
    }
    if (send <= worth_moving) {
      receive(*of, number);
      wrote_memory(to, count, each);
    }
    of->shared->left[of->rank] = of->done = number;
    return of->ready = last + length;
  };
  return launch(stream_of(stream), std::move(work)) ? ncclUnhandledCudaError : ncclSuccess;
}

// Of one rank NCCL makes a copy, or nothing.
bool alone(ncclComm_t of, const void* from, void* to, size_t bytes, cudaStream_t stream) {
  if (((Communicator*)of)->ranks > 1) return false;
  if (from != to) cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return true;
}

// Waits for nobody, and moves nothing.
ncclResult_t passed(size_t bytes, cudaStream_t stream) {
  Told told("cudaLaunchKernelExC");
  Work work;
  work.name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)";
  work.grid = dim3(24), work.block = dim3(544);
  work.length = 5000 + bytes / nvlink_per_ns;
  return launch(stream_of(stream), std::move(work)) ? ncclUnhandledCudaError : ncclSuccess;
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)
ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  unsigned char random[8];
  int file = open("/dev/urandom", O_RDONLY);
  bool read_all = read(file, random, sizeof random) == sizeof random;
  close(file);
  memset(id, 0, sizeof *id);
  char* at = id->internal + snprintf(id->internal, sizeof *id, "/simulated_gpu.");
  for (unsigned char byte : random) at += snprintf(at, 3, "%02x", byte);
  return read_all ? ncclSuccess : ncclSystemError;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the simulated GPU"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) { return join(id.internal, ranks, rank, made); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(id.internal, ranks, rank, made);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return join(ids->internal, ranks, rank, made);
}
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  auto* of = (Communicator*)handle;
  uint64_t number = ++of->asked;
  Place& own = of->place(number, of->rank, true);
  std::pair<int, int> said{color, key};
  memcpy(own.bytes, &said, sizeof said);
  own.number = number;
  int ranks = 0, rank = 0;
  for (int other = 0; other < of->ranks; ++other) {
    Place& place = of->place(number, other, true);
    while (place.number != number) nap();
    auto* theirs = (std::pair<int, int>*)place.bytes;
    if (theirs->first != color) continue;
    ++ranks;
    rank += theirs->second < key || (theirs->second == key && other < of->rank);
  }
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  return join(of->name + "." + std::to_string(number) + "." + std::to_string(color), ranks, rank, made);
}
// Streams may still have what they do together, so that none is deleted.
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t of) { return ((Communicator*)of)->aborted = true, ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclCommCount(ncclComm_t of, int* count) { return *count = ((Communicator*)of)->ranks, ncclSuccess; }
ncclResult_t ncclCommUserRank(ncclComm_t of, int* rank) { return *rank = ((Communicator*)of)->rank, ncclSuccess; }
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t of, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  if (alone(of, from, to, bytes, stream)) return ncclSuccess;
  return meet("AllReduce_Sum_f32_RING_LL", of, stream, from, bytes, bytes, to, count, bytes_of(type),
              [=](Communicator& all, uint64_t number) { reduce(all, number, 0, count, type, how, to); });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how, ncclComm_t of, cudaStream_t stream) {
  auto* all = (Communicator*)of;
  size_t bytes = count * bytes_of(type);
  if (alone(of, from, to, bytes, stream)) return ncclSuccess;
  return meet("ReduceScatter_Sum_f32_RING_LL", of, stream, from, bytes * all->ranks, bytes * all->ranks, to, count, bytes_of(type),
              [=](Communicator& all, uint64_t number) { reduce(all, number, all.rank * count, count, type, how, to); });
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t of, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  if (alone(of, from, to, bytes, stream)) return ncclSuccess;
  int ranks = ((Communicator*)of)->ranks;
  return meet("AllGather_RING_LL", of, stream, from, bytes, bytes * ranks, to, count * ranks, bytes_of(type), [=](Communicator& all, uint64_t number) {
    for (int rank = 0; rank < all.ranks; ++rank) memcpy((char*)to + rank * bytes, all.place(number, rank).bytes, bytes);
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t of, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  if (alone(of, from, to, bytes, stream)) return ncclSuccess;
  return meet("Broadcast_RING_LL", of, stream, ((Communicator*)of)->rank == root ? from : nullptr, bytes, bytes, to, count, bytes_of(type),
              [=](Communicator& all, uint64_t number) { memcpy(to, all.place(number, root).bytes, bytes); }, root);
}
ncclResult_t ncclBcast(void* at, size_t count, ncclDataType_t type, int root, ncclComm_t of, cudaStream_t stream) {
  return ncclBroadcast(at, at, count, type, root, of, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t how, int root, ncclComm_t of, cudaStream_t stream) {
  size_t bytes = count * bytes_of(type);
  if (alone(of, from, to, bytes, stream)) return ncclSuccess;
  return meet("Reduce_Sum_f32_RING_LL", of, stream, from, bytes, bytes, to, count, bytes_of(type), [=](Communicator& all, uint64_t number) {
    if (all.rank == root) reduce(all, number, 0, count, type, how, to);
  }, root + 1);
}
ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
  return passed(count * bytes_of(type), stream);
}
ncclResult_t ncclRecv(void*, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
  return passed(count * bytes_of(type), stream);
}
#pragma GCC visibility pop
}  // extern "C"
