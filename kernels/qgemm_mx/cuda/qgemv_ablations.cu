// Where the ablation of qgemv_mx starts: the same kernel with every weight multiplied by its scale, as is usual, and a column of
// B a token. Arguments as in qgemv_mx.cu.
#include "qgemv_mx.cuh"

#define ENTRY(tokens)                                                                                                          \
  extern "C" __global__ void __launch_bounds__(512, 1) qgemv_scaled_t##tokens(                                                 \
      const uint8_t* weight, const void* x, uint32_t tile_bytes, uint32_t walker_stride, uint32_t stride,                      \
      uint32_t ring_offset, int tiles_per_team, int extra_teams, int slices, uint8_t warps, uint8_t depth, uint8_t walkers,    \
      uint8_t early, void* y, long long y_stride, long long x_stride, const void* bias, const float* row_scale, int teams,     \
      int turn_tiles, int k, int n, int m, int wide) {                                                                         \
    using namespace qgemm_mx::gemv;                                                                                            \
    run<Config<Format::kMxfp4, __nv_bfloat16, tokens, 1, Ring::kBulk, true>>(                                                  \
        {weight, x,        tile_bytes, walker_stride, stride,    ring_offset, tiles_per_team, extra_teams, slices, warps,      \
         depth,  walkers,  early,      y,             y_stride,  x_stride,    bias,           row_scale,   teams,  turn_tiles, \
         k,      n,        m,          wide});                                                                                 \
  }
ENTRY(1)
ENTRY(16)
