// reference: one thread an output, nibbles in sequential order, FP32, no tensor cores.
//
// It proves the encodings on a device and nothing else: it is never a performance result. All formats, any M and N, any K
// that is a multiple of the scale group, strided rows.
#include "formats.cuh"

namespace {
using namespace qgemm_mx::formats;

// Strides: x_stride and y_stride in elements, value_stride in bytes, scale_stride in scales.
template <class Format>
__device__ float weight_at(const uint8_t* values, const typename Format::Scale* scales, int k) {
  const uint32_t byte = values[k >> 1];
  const uint32_t code = k & 1 ? byte >> 4 : byte & 15;  // the low nibble is the even k
  return Format::element(code) * Format::scale(scales[k / Format::kGroup]);
}

// y[M, N] = row_scale[n] * sum over k of x[m, k] * (element * scale), FP32; row_scale is the tensor scale of a row's shard.
template <class Format>
__device__ void reference(const __nv_bfloat16* x, const uint8_t* values, const typename Format::Scale* scales,
                          const float* row_scale, float* y, int m_size, int n_size, int k_size, int64_t x_stride,
                          int64_t value_stride, int64_t scale_stride, int64_t y_stride) {
  const int64_t output = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (output >= int64_t(m_size) * n_size) return;
  const int64_t m = output / n_size, n = output % n_size;
  float sum = 0.0f;
  for (int k = 0; k < k_size; ++k) {
    const float weight = weight_at<Format>(values + n * value_stride, scales + n * scale_stride, k);
    sum = fmaf(__bfloat162float(x[m * x_stride + k]), weight, sum);
  }
  y[m * y_stride + n] = row_scale[n] * sum;
}

// w[N, K] in FP32, contiguous: (element * scale) * row_scale[n], the packer's own order of operations.
template <class Format>
__device__ void decode(const uint8_t* values, const typename Format::Scale* scales, const float* row_scale, float* w,
                       int n_size, int k_size, int64_t value_stride, int64_t scale_stride) {
  const int64_t index = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (index >= int64_t(n_size) * k_size) return;
  const int64_t n = index / k_size;
  const int k = static_cast<int>(index % k_size);
  w[index] = weight_at<Format>(values + n * value_stride, scales + n * scale_stride, k) * row_scale[n];
}
}  // namespace

#define REFERENCE(name, Format)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256) reference_##name(                                                  \
      const __nv_bfloat16* x, const uint8_t* values, const Format::Scale* scales, const float* row_scale, float* y,    \
      int m_size, int n_size, int k_size, int64_t x_stride, int64_t value_stride, int64_t scale_stride,                \
      int64_t y_stride) {                                                                                              \
    reference<Format>(x, values, scales, row_scale, y, m_size, n_size, k_size, x_stride, value_stride, scale_stride,   \
                      y_stride);                                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      reference_decode_##name(const uint8_t* values, const Format::Scale* scales, const float* row_scale, float* w,    \
                              int n_size, int k_size, int64_t value_stride, int64_t scale_stride) {                    \
    decode<Format>(values, scales, row_scale, w, n_size, k_size, value_stride, scale_stride);                          \
  }

REFERENCE(mxfp4, Mxfp4)
REFERENCE(nvfp4, Nvfp4)
REFERENCE(int4_g128, Int4<128>)
REFERENCE(int4_g64, Int4<64>)
#undef REFERENCE
