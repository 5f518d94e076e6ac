// Entries of qgemv_mx: format, activation, tokens at most, blocks of a cluster (c) and the kind of ring.
// Their arguments are in the order of qgemm_mx::gemv::Arguments.
#include "qgemv_mx.cuh"

// At most 16 warps, as one block or two: 128 registers a thread.
#define ENTRY(name, act, tokens, ranks, suffix, cluster, format, type, ring)                                                   \
  extern "C" __global__ void cluster __launch_bounds__(512, 1) qgemv_mx_##name##_##act##_t##tokens##_c##ranks##suffix(         \
      const uint8_t* weight, const void* x, uint32_t tile_bytes, uint32_t walker_stride, uint32_t stride,                      \
      uint32_t ring_offset, int tiles_per_team, int extra_teams, int slices, uint8_t warps, uint8_t depth, uint8_t walkers,    \
      uint8_t early, void* y, long long y_stride, long long x_stride, const void* bias, const float* row_scale, int teams,     \
      int turn_tiles, int k, int n, int m, int wide) {                                                                         \
    using namespace qgemm_mx::gemv;                                                                                            \
    run<Config<Format::format, type, tokens, ranks, Ring::ring>>(                                                              \
        {weight, x,        tile_bytes, walker_stride, stride,    ring_offset, tiles_per_team, extra_teams, slices, warps,      \
         depth,  walkers,  early,      y,             y_stride,  x_stride,    bias,           row_scale,   teams,  turn_tiles, \
         k,      n,        m,          wide});                                                                                 \
  }
#define RINGS(name, act, tokens, format, type)                                       \
  ENTRY(name, act, tokens, 1, , , format, type, kAsync)                              \
  ENTRY(name, act, tokens, 2, , __cluster_dims__(2, 1, 1), format, type, kAsync)     \
  ENTRY(name, act, tokens, 1, _bulk, , format, type, kBulk)
#define TOKENS(name, act, format, type) \
  RINGS(name, act, 1, format, type)     \
  RINGS(name, act, 2, format, type)     \
  RINGS(name, act, 4, format, type)     \
  RINGS(name, act, 8, format, type)     \
  RINGS(name, act, 16, format, type)
#define ACTIVATIONS(name, format)           \
  TOKENS(name, bf16, format, __nv_bfloat16) \
  TOKENS(name, fp16, format, __half)
ACTIVATIONS(mxfp4, kMxfp4)
ACTIVATIONS(nvfp4, kNvfp4)
ACTIVATIONS(int4_g128, kInt4)
