// Entries of qgemv_mx: format, activation, tokens at most, blocks of a cluster (c) and the kind of ring.
#include "qgemv_mx.cuh"

#define ENTRY(name, act, tokens, ranks, suffix, cluster, format, type, ring)                                  \
  QGEMV_ENTRY(qgemv_mx_##name##_##act##_t##tokens##_c##ranks##suffix, cluster, Format::format, type, tokens, \
              ranks, Ring::ring)
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
