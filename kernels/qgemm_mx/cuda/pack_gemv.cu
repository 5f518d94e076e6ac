// pack_gemv: values and scales of a checkpoint into the layout of qgemv_mx, one thread a 32-bit word of it.
//
// The layout and its bit order are written down in qgemm_mx/gemv_layout.py, whose bytes these are. A pair of a word is two
// neighbouring k, so it is one byte of the source: a word gathers two bytes from each of two rows.
#include <cstdint>

namespace qgemm_mx::gemv_packing {

constexpr int kRows = 16, kChunk = 64, kChunks = 4;
constexpr int kChunkWords = kRows * kChunk / 8;  // of values
constexpr int kScaleWord = 8;                    // 32-bit words: one a lane group

struct Mxfp4 {
  static constexpr bool kE2m1 = true;
  static constexpr int kGroup = 32;
  using Scale = uint8_t;
  static __device__ bool wide(Scale code) { return code > 192; }  // 2^66 and above, NaN
};

struct Nvfp4 {
  static constexpr bool kE2m1 = true;
  static constexpr int kGroup = 16;
  using Scale = uint8_t;
  static __device__ bool wide(Scale code) { return code >= 0x7F; }  // NaN, and everything with a sign
};

struct Int4g128 {
  static constexpr bool kE2m1 = false;
  static constexpr int kGroup = 128;
  using Scale = uint16_t;
  static __device__ bool wide(Scale) { return false; }
};

// The bits of a code as pair j of a half word.
template <class Format>
__device__ __forceinline__ uint32_t half_word_bits(uint32_t code, int j) {
  if constexpr (!Format::kE2m1) return code << (4 * j);
  const uint32_t magnitude = code & 7, sign = code >> 3;
  if (j < 3) return magnitude << (6 - 3 * j) | sign << (15 - 3 * j);
  return (magnitude & 3) << 10 | (magnitude >> 2) << 13 | sign << 14;
}

// Strides: value_stride in bytes, scale_stride in scales. k is a multiple of 32 and of the scale group.
struct Source {
  const uint8_t* values;
  const void* scales;
  int n, k;
  int64_t value_stride, scale_stride;
};

// Word `word` of a chunk's values: lane 4g + t, step s.
template <class Format>
__device__ __forceinline__ uint32_t value_word(const Source& source, int tile, int chunk, int word) {
  const int g = word / 16, t = word / 4 % 4, s = word % 4;
  const int first = Format::kGroup == 16 ? 16 * s + 4 * t : 32 * (s / 2) + 8 * t + 4 * (s % 2);
  uint32_t packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = tile * kRows + g + 8 * (j % 2), k = chunk * kChunk + first + 2 * (j / 2);
    if (row >= source.n || k >= source.k) continue;
    const uint32_t pair = source.values[row * source.value_stride + k / 2];
    packed |= half_word_bits<Format>(pair & 15, j) | half_word_bits<Format>(pair >> 4, j) << 16;
  }
  return packed;
}

// Scales of row g and row g + 8: word `word` of the tile, counted from the start of K.
template <class Format>
__device__ __forceinline__ uint32_t scale_word(const Source& source, int tile, int word, int g, int32_t* wide) {
  using Scale = typename Format::Scale;
  constexpr int kEach = 2 / sizeof(Scale);  // groups a word
  uint32_t packed = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = tile * kRows + g + 8 * half, group = word * kEach + i;
      if (row >= source.n || group >= source.k / Format::kGroup) continue;
      const Scale code = static_cast<const Scale*>(source.scales)[row * source.scale_stride + group];
      packed |= static_cast<uint32_t>(code) << (16 * half + 8 * sizeof(Scale) * i);
      if (Format::wide(code)) *wide = 1;  // every writer writes the same
    }
  }
  return packed;
}

template <class Format>
__device__ __forceinline__ void pack(const Source& source, uint32_t* packed, int32_t* wide) {
  // Words of scales a slice: int4 has one 32-byte word for two chunks.
  constexpr int kSliceScaleWords = kChunks * kChunk / Format::kGroup * static_cast<int>(sizeof(typename Format::Scale)) / 2;
  constexpr int kUnit = kChunks * kChunkWords + kSliceScaleWords * kScaleWord;
  const int chunks = (source.k + kChunk - 1) / kChunk, tiles = (source.n + kRows - 1) / kRows;
  const int64_t tile_words = static_cast<int64_t>(chunks) * (kUnit / kChunks);
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (index >= tiles * tile_words) return;
  const int tile = static_cast<int>(index / tile_words), at = static_cast<int>(index % tile_words);
  const int slice = at / kUnit, in_unit = at % kUnit;
  const int value_words = min(kChunks, chunks - slice * kChunks) * kChunkWords;
  if (in_unit < value_words) {
    const int chunk = slice * kChunks + in_unit / kChunkWords;
    packed[index] = value_word<Format>(source, tile, chunk, in_unit % kChunkWords);
  } else {
    const int in_scales = in_unit - value_words;
    const int word = slice * kSliceScaleWords + in_scales / kScaleWord;
    packed[index] = scale_word<Format>(source, tile, word, in_scales % kScaleWord, wide);
  }
}

}  // namespace qgemm_mx::gemv_packing

// *wide becomes 1 where a scale is outside the common range; the caller sets it to 0 first.
#define PACK_GEMV(name, Format)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      pack_gemv_##name(const uint8_t* values, const void* scales, uint32_t* packed, int32_t* wide, int n, int k,       \
                       int64_t value_stride, int64_t scale_stride) {                                                   \
    const qgemm_mx::gemv_packing::Source source{values, scales, n, k, value_stride, scale_stride};                     \
    qgemm_mx::gemv_packing::pack<qgemm_mx::gemv_packing::Format>(source, packed, wide);                                \
  }

PACK_GEMV(mxfp4, Mxfp4)
PACK_GEMV(nvfp4, Nvfp4)
PACK_GEMV(int4_g128, Int4g128)
#undef PACK_GEMV
