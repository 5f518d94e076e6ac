// Entries of qgemm_mx: format, tokens of a block (t), rows of a block (r), warpgroups that share K (k).
#include "qgemm_mx.cuh"

#define ENTRY(name, format, tokens, row_tiles, consumers, ways, rows, suffix)                                                 \
  extern "C" __global__ void __launch_bounds__(128 * consumers + 128, 1)                                                      \
      qgemm_mx_##name##_bf16_t##tokens##_r##rows##suffix(const __grid_constant__ qgemm_mx::gemm::Arguments a) {               \
    using namespace qgemm_mx::gemm;                                                                                           \
    run<Config<Format::format, tokens, row_tiles, consumers, ways>>(a);                                                       \
  }
#define FEW(name, format, tokens)             \
  ENTRY(name, format, tokens, 1, 2, 1, 128, ) \
  ENTRY(name, format, tokens, 1, 2, 2, 64, _k2)
#define TILES(name, format)                \
  FEW(name, format, 16)                    \
  FEW(name, format, 32)                    \
  FEW(name, format, 64)                    \
  ENTRY(name, format, 128, 1, 2, 1, 128, ) \
  ENTRY(name, format, 128, 2, 2, 1, 256, ) \
  ENTRY(name, format, 256, 1, 2, 1, 128, )
TILES(mxfp4, kMxfp4)
TILES(nvfp4, kNvfp4)
ENTRY(int4_g128, kInt4, 32, 1, 2, 1, 128, )
ENTRY(int4_g128, kInt4, 64, 1, 2, 1, 128, )
ENTRY(int4_g128, kInt4, 128, 1, 2, 1, 128, )
