// cuBLAS and cuBLASLt as PyTorch calls them: a product takes the time of its operations.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <algorithm>
#include <cstring>

#include "gpu.h"

using namespace gpu;

namespace {

struct Handle {
  cudaStream_t stream = nullptr;
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

int bytes_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_64F: return 8;
    case CUDA_R_16F: case CUDA_R_16BF: return 2;
    case CUDA_R_8F_E4M3: case CUDA_R_8F_E5M2: case CUDA_R_8I: return 1;
    default: return 4;
  }
}

// At 70 % of an H100's peak, of operands of `bytes` each.
int64_t matmul_length(double m, double n, double k, double batch, int bytes) {
  double per_ns = (bytes <= 1 ? 1979e3 : bytes == 2 ? 989e3 : bytes == 4 ? 67e3 : 34e3) * 0.7;
  double moved = batch * bytes * (m * k + k * n + m * n) / memory_per_ns;
  return start_of_kernel + std::max(2 * m * n * k * batch / per_ns, moved);
}

cublasStatus_t multiplied(cudaStream_t stream, double m, double n, double k, double batch, cudaDataType_t type, bool tf32 = false) {
  int bytes = bytes_of(type);
  Work work;
  work.name = bytes == 2   ? "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT"
              : bytes == 4 ? tf32 ? "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_cublas" : "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x128x8_cublas"
                           : "cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1";
  work.grid = dim3(132), work.block = dim3(384);
  work.length = matmul_length(m, n, k, batch, bytes) / (tf32 && bytes == 4 ? 7 : 1);
  Told told("cudaLaunchKernelExC");
  return launch(stream_of(stream), std::move(work)) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t multiplied(cublasHandle_t handle, double m, double n, double k, double batch, cudaDataType_t type) {
  auto* of = (Handle*)handle;
  return multiplied(of->stream, m, n, k, batch, type, of->math & CUBLAS_TF32_TENSOR_OP_MATH);
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = (cublasHandle_t) new Handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete (Handle*)handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  ((Handle*)handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t* stream) {
  *stream = ((Handle*)handle)->stream;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t math) {
  ((Handle*)handle)->math = math;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t* math) {
  *math = ((Handle*)handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) {
  ((Handle*)handle)->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t* mode) {
  *mode = ((Handle*)handle)->pointers;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const float*, const float*, int, const float*, int,
                              const float*, float*, int) {
  return multiplied(handle, m, 1, n, 1, CUDA_R_32F);
}
cublasStatus_t cublasDgemv_v2(cublasHandle_t handle, cublasOperation_t, int m, int n, const double*, const double*, int, const double*,
                              int, const double*, double*, int) {
  return multiplied(handle, m, 1, n, 1, CUDA_R_64F);
}
cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int n, const float*, int, const float*, int, float*) {
  return multiplied(handle, 1, 1, n, 1, CUDA_R_32F);
}
cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int n, const double*, int, const double*, int, double*) {
  return multiplied(handle, 1, 1, n, 1, CUDA_R_64F);
}
cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void*, cudaDataType type, int, const void*, cudaDataType, int, void*,
                           cudaDataType, cudaDataType) {
  return multiplied(handle, 1, 1, n, 1, type);
}
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*, const void*,
                            cudaDataType_t type, int, const void*, cudaDataType_t, int, const void*, void*, cudaDataType_t, int,
                            cublasComputeType_t, cublasGemmAlgo_t) {
  return multiplied(handle, m, n, k, 1, type);
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void*,
                                          const void*, cudaDataType_t type, int, long long, const void*, cudaDataType_t, int, long long,
                                          const void*, void*, cudaDataType_t, int, long long, int batch, cublasComputeType_t,
                                          cublasGemmAlgo_t) {
  return multiplied(handle, m, n, k, batch, type);
}
cublasStatus_t cublasSgemmEx(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*, const void*,
                             cudaDataType_t type, int, const void*, cudaDataType_t, int, const float*, void*, cudaDataType_t, int) {
  return multiplied(handle, m, n, k, 1, type);
}
cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                              const float*, int, const float*, int, const float*, float*, int) {
  return multiplied(handle, m, n, k, 1, CUDA_R_32F);
}
cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const double*,
                              const double*, int, const double*, int, const double*, double*, int) {
  return multiplied(handle, m, n, k, 1, CUDA_R_64F);
}
cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t, cublasOperation_t, int m, int n, int k, const float*,
                                         const float*, int, long long, const float*, int, long long, const float*, float*, int,
                                         long long, int batch) {
  return multiplied(handle, m, n, k, batch, CUDA_R_32F);
}

// cuBLASLt: a layout keeps its shape, a descriptor that of the product's inner dimension is read of the first operand.
struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int32_t batch;
};
struct Description {
  cublasOperation_t first = CUBLAS_OP_N;
};
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = (cublasLtHandle_t) new Handle;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t) {
  *layout = (cublasLtMatrixLayout_t) new Layout{type, rows, columns, 1};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete (Layout*)layout;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, size_t) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout*)layout)->batch = *(const int32_t*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* description, cublasComputeType_t, cudaDataType_t) {
  *description = (cublasLtMatmulDesc_t) new Description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t description) {
  delete (Description*)description;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t) {
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) ((Description*)description)->first = *(const cublasOperation_t*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = (cublasLtMatmulPreference_t) new char;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete (char*)preference;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*,
                                                    size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t* results, int* count) {
  memset(results, 0, sizeof *results);
  results->state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t description, const void*, const void*, cublasLtMatrixLayout_t first,
                              const void*, cublasLtMatrixLayout_t, const void*, const void*, cublasLtMatrixLayout_t, void*,
                              cublasLtMatrixLayout_t result, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto *a = (Layout*)first, *d = (Layout*)result;
  double k = ((Description*)description)->first == CUBLAS_OP_N ? a->columns : a->rows;
  return multiplied(stream, d->rows, d->columns, k, d->batch, a->type);
}

#pragma GCC visibility pop
}  // extern "C"
