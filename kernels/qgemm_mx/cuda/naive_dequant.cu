// naive_dequant: writes the weight back to memory in BF16, for a dense library product to read. The sanity floor: any
// fused kernel must beat it.
#include "formats.cuh"

namespace {
using namespace qgemm_mx::formats;

// w[N, K] BF16, contiguous; the tensor scale stays out: it belongs to the product's FP32 epilogue.
// A thread turns 16 nibbles (8 bytes) into 32 bytes. Constraint: K is a multiple of 16, which every group is.
template <class Format>
__device__ void dequantise(const uint2* values, const typename Format::Scale* scales, uint4* w, int64_t slices) {
  const int64_t slice = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (slice >= slices) return;
  const uint2 packed = values[slice];
  // Slices and scales both run along K without a gap, so the scale's index follows from the slice's.
  const float scale = Format::scale(scales[slice / (Format::kGroup / 16)]);
  uint32_t pairs[8];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const uint32_t byte = (pair < 4 ? packed.x : packed.y) >> (8 * (pair % 4));
    const __nv_bfloat162 both =
        __floats2bfloat162_rn(Format::element(byte & 15) * scale, Format::element((byte >> 4) & 15) * scale);
    pairs[pair] = *reinterpret_cast<const uint32_t*>(&both);
  }
  w[2 * slice] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  w[2 * slice + 1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}
}  // namespace

#define NAIVE_DEQUANT(name, Format)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      naive_dequant_##name(const uint2* values, const Format::Scale* scales, uint4* w, int64_t slices) {               \
    dequantise<Format>(values, scales, w, slices);                                                                     \
  }

NAIVE_DEQUANT(mxfp4, Mxfp4)
NAIVE_DEQUANT(nvfp4, Nvfp4)
NAIVE_DEQUANT(int4_g128, Int4<128>)
NAIVE_DEQUANT(int4_g64, Int4<64>)
#undef NAIVE_DEQUANT
