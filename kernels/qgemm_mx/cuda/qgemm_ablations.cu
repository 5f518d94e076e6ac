// Where the ablation of qgemm_mx starts: every product is waited for before the next fragments are made.
#include "qgemm_mx.cuh"

#define ENTRY(tokens)                                                                                \
  extern "C" __global__ void __launch_bounds__(384, 1)                                               \
      qgemm_mx_waiting_mxfp4_bf16_t##tokens##_r128(const __grid_constant__ qgemm_mx::gemm::Arguments a) { \
    using namespace qgemm_mx::gemm;                                                                  \
    run<Config<Format::kMxfp4, tokens, 1, 2, 1, false>>(a);                                          \
  }
ENTRY(64)
