// Kernels: what compiled CUDA code registers at its load, and launches.
//
// A kernel writes nothing, but for two, and takes the time that `length_of` gives it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <unordered_map>

#include "gpu.h"

namespace gpu {

const int64_t start_of_kernel = 2000;
const double cycles_per_ns = setting("SIMULATED_GPU_GHZ", 1.755);

namespace {

// A kernel with this in its name fails an assertion.
const char* const asserting = getenv("SIMULATED_GPU_ASSERTS");

std::unordered_map<const void*, std::string>& kernels() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

int64_t length_of(const std::string& name, dim3 grid, dim3 block, void** args) {
  if (name.find("spin_kernel") != std::string::npos) return *(int64_t*)args[0] / cycles_per_ns;
  size_t lists = name.find("TensorListMetadataILi");  // an optimizer's or a norm's: a block has 65,536 elements of each list
  if (lists != std::string::npos) return start_of_kernel + grid.x * 65536.0 * 8 * atoi(&name[lists + 21]) / memory_per_ns;
  double threads = double(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
  return start_of_kernel + threads * 32 / memory_per_ns;  // four elements a thread, each read and written
}

// The two kernels that compute, on a few int64: with them PyTorch finds its way in an object that ranks send each other.
void stored(int64_t* to, int64_t value) {
  *to = value;
  wrote_memory(to, 1, sizeof value);
}
std::vector<int64_t> read_numbers(const void* from, int count) {
  std::vector<int64_t> into(count);
  for (int i = 0; i < count; ++i) read_memory(&into[i], (const int64_t*)from + i, sizeof into[i]);
  return into;
}
bool on_device(const void* at) { return memory_kind(at) == 3; }
// Of its one argument (`ReduceOp`) the shape stands where `ReduceConfig` has it; the first addresses are in and out.
std::function<void()> summed(void** args) {
  auto* shape = (int*)args[0] + 4;  // bytes of a number, inputs, outputs
  int inputs = shape[1];
  if (shape[2] != 1 || inputs > 64) return nullptr;
  auto** end = (void**)args[0] + 127;
  auto** from = std::find_if((void**)(shape + 4), end, on_device);
  if (from == end || !on_device(from[1])) return nullptr;
  return [inputs, from = from[0], to = (int64_t*)from[1]] {
    auto numbers = read_numbers(from, inputs);
    stored(to, std::accumulate(numbers.begin(), numbers.end(), int64_t(0)));
  };
}
// A tensor and so many times a number: how many, both factors, the addresses of out and in.
std::function<void()> added(void** args) {
  int count = *(int*)args[0];
  if (count > 64) return nullptr;
  auto *factors = (int64_t*)args[1], **at = (int64_t**)args[2];
  return [=, more = factors[0] * factors[1], to = at[0], from = at[1]] {
    auto numbers = read_numbers(from, count);
    for (int i = 0; i < count; ++i) stored(to + i, numbers[i] + more);
  };
}
std::function<void()> computed(const std::string& kernel, void** args) {
  if (kernel.find("8ReduceOpIlNS0_14func_wrapper_tIlZNS0_11sum_functorIlllE") != std::string::npos) return summed(args);
  if (kernel.find("21CUDAFunctorOnSelf_addIlEESt5arrayIPcLm2EEEEviT0_T1_") != std::string::npos) return added(args);
  return nullptr;
}

// The driver keeps so many launches that a stream is not done with: who launches more waits for the first of them.
const size_t launches_kept = 1024;
void wait_for_room(Stream* stream) {
  int64_t until = 0;
  {
    Guard guard(lock);
    if (stream->capture) return;
    auto& launches = stream->launches;
    while (!launches.empty() && launches.front() <= now()) launches.pop_front();
    if (launches.size() >= launches_kept) until = launches[launches.size() - launches_kept];
  }
  if (until) sleep_until(until);
}

cudaError_t launched(const void* host, dim3 grid, dim3 block, void** args, cudaStream_t stream) {
  if (!grid.x || !grid.y || !grid.z || !block.x || double(block.x) * block.y * block.z > 1024)
    return failed(cudaErrorInvalidConfiguration);
  Work work;
  {
    Guard guard(lock);
    auto found = kernels().find(host);
    work.name = found == kernels().end() ? "unknown" : found->second;
    work.moves = computed(work.name, args);
  }
  work.grid = grid, work.block = block;
  work.length = length_of(work.name, grid, block, args);
  return launch(stream_of(stream), std::move(work));
}

}  // namespace

cudaError_t launch(Stream* stream, Work kernel) {
  ALIVE;
  wait_for_room(stream);
  Guard guard(lock);
  bool asserts = asserting && kernel.name.find(asserting) != std::string::npos;
  enqueue(stream, std::move(kernel));
  if (stream->capture) return cudaSuccess;
  stream->launches.push_back(stream->ready);
  if (asserts) fail_at(stream->ready);
  return cudaSuccess;
}

}  // namespace gpu

using namespace gpu;

extern "C" {
#pragma GCC visibility push(default)

void** __cudaRegisterFatBinary(void*) {
  static void* module[4];
  return module;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  kernels().emplace(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct Shape {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Shape> shapes;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  shapes.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Shape shape = shapes.back();
  shapes.pop_back();
  *grid = shape.grid, *block = shape.block, *shared = shape.shared, *(void**)stream = shape.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = (cudaKernel_t)host;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t, cudaStream_t stream) {
  TOLD;
  return launched(host, grid, block, args, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t, cudaStream_t stream) {
  TOLD;
  return launched((const void*)kernel, grid, block, args, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** args, size_t, cudaStream_t stream) {
  TOLD;
  return launched(host, grid, block, args, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** args) {
  TOLD;
  return launched(host, config->gridDim, config->blockDim, args, config->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  TOLD;
  Work work;
  work.kind = Work::host, work.call = call, work.data = data;
  enqueue(stream_of(stream), work);
  return cudaSuccess;
}
struct Callback {
  cudaStreamCallback_t call;
  cudaStream_t stream;
  void* data;
};
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  TOLD;
  return cudaLaunchHostFunc(
      stream,
      [](void* given) {
        auto* callback = (Callback*)given;
        callback->call(callback->stream, cudaSuccess, callback->data);
        delete callback;
      },
      new Callback{call, stream, data});
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  TOLD;
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  TOLD;
  return cudaSuccess;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  TOLD;
  *blocks = 2;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  TOLD;
  *blocks = 2;
  return cudaSuccess;
}

#pragma GCC visibility pop
}  // extern "C"
