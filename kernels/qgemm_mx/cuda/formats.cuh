// Decoding of the 4-bit formats in FP32, exactly as qgemm_mx/formats.py decodes them.
//
// Constraint: build without -ftz. E8M0 code 0 is 2^-127 and its products with E2M1 elements are FP32 subnormals.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

namespace qgemm_mx::formats {

// E2M1: sign, two exponent bits, one mantissa bit. Code 8 is -0.
__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7, sign = (code & 8) << 28;
  const uint32_t normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22);
  const uint32_t subnormal = magnitude ? 0x3F000000u : 0u;  // 0.5 or 0
  return __uint_as_float(sign | (magnitude >= 2 ? normal : subnormal));
}

// Two's complement nibble, -8..7.
__device__ __forceinline__ float decode_int4(uint32_t code) {
  return static_cast<float>(static_cast<int32_t>(code << 28) >> 28);
}

// E8M0: 2^(code - 127); code 0 is an FP32 subnormal, code 255 is NaN.
__device__ __forceinline__ float decode_e8m0(uint32_t code) {
  if (code == 0) return __uint_as_float(0x00400000u);
  return __uint_as_float(code == 255 ? 0x7FC00000u : code << 23);
}

// E4M3FN: no infinity; 0x7F and 0xFF are NaN; subnormals are mantissa * 2^-9.
__device__ __forceinline__ float decode_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7F, sign = (code & 0x80) << 24;
  if (magnitude == 0x7F) return __uint_as_float(0x7FC00000u);
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : __uint_as_float((magnitude << 20) + ((127 - 7) << 23));
  return __uint_as_float(__float_as_uint(value) | sign);
}

__device__ __forceinline__ float decode_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

// A format: elements a scale, the type of a stored scale, and both decoders.
struct Mxfp4 {
  static constexpr int kGroup = 32;
  using Scale = uint8_t;
  static __device__ __forceinline__ float element(uint32_t code) { return decode_e2m1(code); }
  static __device__ __forceinline__ float scale(Scale code) { return decode_e8m0(code); }
};

struct Nvfp4 {
  static constexpr int kGroup = 16;
  using Scale = uint8_t;
  static __device__ __forceinline__ float element(uint32_t code) { return decode_e2m1(code); }
  static __device__ __forceinline__ float scale(Scale code) { return decode_e4m3(code); }
};

template <int kGroupSize>
struct Int4 {
  static constexpr int kGroup = kGroupSize;
  using Scale = uint16_t;
  static __device__ __forceinline__ float element(uint32_t code) { return decode_int4(code); }
  static __device__ __forceinline__ float scale(Scale code) { return decode_bf16(code); }
};

}  // namespace qgemm_mx::formats
