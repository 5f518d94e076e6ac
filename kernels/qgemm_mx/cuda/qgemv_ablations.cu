// Where the ablation of qgemv_mx starts: the same kernel with every weight multiplied by its scale, as is usual, and a column of
// B a token.
#include "qgemv_mx.cuh"

#define ENTRY(tokens) \
  QGEMV_ENTRY(qgemv_scaled_t##tokens, , Format::kMxfp4, __nv_bfloat16, tokens, 1, Ring::kBulk, true)
ENTRY(1)
ENTRY(16)
