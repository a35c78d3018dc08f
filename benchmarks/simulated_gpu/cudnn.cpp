// cuDNN's graph API, through which PyTorch asks for attention on Hopper: any graph has one plan, which needs no workspace.
#include <cudnn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <vector>

#include "gpu.h"

using namespace gpu;

namespace {
struct Handle {
  cudaStream_t stream = nullptr;
};
struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, std::vector<char>> set;  // by attribute
};
size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_BACKEND_DESCRIPTOR: case CUDNN_TYPE_DOUBLE: return 8;
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    default: return 4;
  }
}
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = (cudnnHandle_t) new Handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete (Handle*)handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  ((Handle*)handle)->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = ((Handle*)handle)->stream;
  return CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* cudnnGetErrorString(cudnnStatus_t) { return "an error of the simulated GPU"; }
void cudnnGetLastErrorString(char* text, size_t length) { snprintf(text, length, "an error of the simulated GPU"); }

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  *made = (cudnnBackendDescriptor_t) new Descriptor{type, {}};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }  // others may hold it
cudnnStatus_t cudnnBackendInitialize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t count, const void* values) {
  size_t bytes = count * bytes_of(type);
  ((Descriptor*)of)->set[name].assign((const char*)values, (const char*)values + bytes);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t of, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                       int64_t requested, int64_t* count, void* values) {
  auto& set = ((Descriptor*)of)->set;
  auto given = set.find(name);
  int64_t held = given == set.end() ? 0 : given->second.size() / bytes_of(type);
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: held = 1; break;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      held = 1;
      if (values) *(int64_t*)values = 1;
      break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE: case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE: case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      held = 1;
      if (values) *(int64_t*)values = 0;
      break;
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED:
      held = 1;
      if (values) *(int32_t*)values = 200000;
      break;
    default:
      if (held && values && requested) memcpy(values, given->second.data(), std::min(held, requested) * bytes_of(type));
  }
  if (count) *count = held;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  Told told("cuLaunchKernelEx");
  Work work;
  work.name = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0";
  work.grid = dim3(132), work.block = dim3(384);
  work.length = 50000;
  return launch(stream_of(((Handle*)handle)->stream), std::move(work)) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
#pragma GCC visibility pop
}
