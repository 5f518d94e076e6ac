// pack_gemv: values and scales of a checkpoint into the packed layout of the kernels, one thread a 32-bit word of it.
//
// The layout and its bit order are written down in qgemm_mx/gemv_layout.py, whose bytes these are. A pair of a word is two
// neighbouring k, so it is one byte of the source: a word gathers two bytes from each of two rows.
#include <cstdint>

namespace qgemm_mx::gemv_packing {

constexpr int kRows = 16, kChunk = 64, kChunks = 4, kSlice = kChunks * kChunk;
constexpr int kChunkWords = kRows * kChunk / 8;  // of values
constexpr int kLaneGroups = 8;                   // each has the scales of rows g and g + 8

// kFolded: elements take what a packed scale has no room for. kRanged: the range of scale codes is of use.
struct Mxfp4 {
  static constexpr bool kE2m1 = true, kFolded = false, kRanged = true;
  static constexpr int kGroup = 32;
  using Scale = uint8_t;
  static __device__ bool wide(Scale code) { return code > 192; }  // 2^66 and above, NaN
  // As the exponent of an FP32 this is the scale times 2^62.
  static __device__ Scale stored(Scale code) { return static_cast<Scale>(code + 62); }
};

struct Nvfp4 {
  static constexpr bool kE2m1 = true, kFolded = true, kRanged = false;
  static constexpr int kGroup = 16;
  using Scale = uint8_t;
  static __device__ bool wide(Scale code) { return (code & 0x7F) == 0x7F; }  // NaN
  // Unsigned E5M3: the exponent + 22, then three bits of mantissa. Sign and zero of a scale are in its elements, see `folded`.
  static __device__ Scale stored(Scale code) {
    const int magnitude = code & 0x7F;
    if (magnitude == 0x7F) return 255;
    if (magnitude >= 8) return static_cast<Scale>(magnitude + 120);
    return static_cast<Scale>(0x7E7C7A7874706800ull >> (8 * magnitude));  // a byte each: 0, then 1 to 7 times 2^-9
  }
};

struct Int4g128 {
  static constexpr bool kE2m1 = false, kFolded = false, kRanged = false;
  static constexpr int kGroup = 128;
  using Scale = uint16_t;
  static __device__ bool wide(Scale) { return false; }
  static __device__ Scale stored(Scale code) { return code; }
};

// One bit of each half word, at its lowest place.
__device__ __forceinline__ uint32_t bit(uint32_t word, int place) { return (word >> place) & 0x00010001u; }
__device__ __forceinline__ uint32_t halves_swapped(uint32_t word) { return word << 16 | word >> 16; }

// The word of which the kernel's `place` makes these pairs: both half words at once; q are bits of the word, r of its rotation by 10.
__device__ __forceinline__ uint32_t encode(const uint32_t (&pair)[4]) {
  const uint32_t q0 = pair[0] | pair[1] >> 4;
  const uint32_t r15 = bit(pair[3], 15) ^ bit(q0, 3);
  const uint32_t q9 = bit(pair[2], 15) ^ r15;
  const uint32_t r8 = bit(pair[2], 8) ^ bit(q0, 2);
  const uint32_t r6 = bit(pair[3], 8) ^ r8;
  const uint32_t r7 = bit(pair[3], 7) ^ halves_swapped(bit(q0, 11));
  const uint32_t r4 = bit(pair[3], 6) ^ r6;
  const uint32_t q1 = bit(pair[2], 7) ^ r7;
  const uint32_t own = q0 | r15 << 5 | q9 << 9 | q1 << 1 | (bit(pair[2], 6) ^ r6);
  return own | halves_swapped(r8 << 14 | r6 << 12 | r7 << 13 | r4 << 10);
}

// Of what the caller learns.
enum Status { kWide, kLargest, kLeast };

// Strides: value_stride in bytes, scale_stride in scales. k is a multiple of 32 and of the scale group.
struct Source {
  const uint8_t* values;
  const void* scales;
  int n, k;
  int64_t value_stride, scale_stride;
};

// Codes of a pair under a scale of NVFP4, whose packed form has no sign and no zero of its own: 0 stands for 2^97 where a kernel
// makes a BF16 of it.
__device__ __forceinline__ uint32_t folded(uint32_t codes, uint8_t scale) {
  const uint32_t kept = (scale & 0x7F) == 0 ? codes & 0x00080008u : codes;
  return kept ^ (scale & 0x80 ? 0x00080008u : 0u);
}

// Word `word` of a chunk's values: lane 4g + t, step s.
template <class Format>
__device__ __forceinline__ uint32_t value_word(const Source& source, int tile, int chunk, int word) {
  const int g = word / 16, t = word / 4 % 4, s = word % 4;
  uint32_t codes[4];  // of a pair, at the lowest places of the half words
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = tile * kRows + g + 8 * (j % 2), k = chunk * kChunk + 16 * s + 2 * t + 8 * (j / 2);
    const bool there = row < source.n && k < source.k;
    const uint32_t byte = there ? source.values[row * source.value_stride + k / 2] : 0;
    codes[j] = (byte & 15) | byte >> 4 << 16;
    if constexpr (Format::kFolded)
      if (there)
        codes[j] = folded(codes[j], static_cast<const uint8_t*>(source.scales)[row * source.scale_stride + k / Format::kGroup]);
  }
  if constexpr (Format::kE2m1) {
    // Sign and magnitude where two BF16 have them.
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = (codes[j] & 0x00070007u) << 6 | (codes[j] & 0x00080008u) << 12;
    return encode(codes);
  } else {
    return codes[0] | codes[1] << 4 | codes[2] << 8 | codes[3] << 12;
  }
}

// Scales of row g and row g + 8: word `word` of the tile, counted from the start of K.
template <class Format>
__device__ __forceinline__ uint32_t scale_word(const Source& source, int tile, int word, int g, int32_t* status) {
  using Scale = typename Format::Scale;
  constexpr int kEach = 2 / sizeof(Scale);  // groups a word
  uint32_t packed = 0;
  int largest = 0, least = 255;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int row = tile * kRows + g + 8 * half, group = word * kEach + i;
      Scale code = 0;  // of rows and groups that are not there
      if (row < source.n && group < source.k / Format::kGroup) {
        code = static_cast<const Scale*>(source.scales)[row * source.scale_stride + group];
        if (Format::wide(code)) status[kWide] = 1;  // every writer writes the same
        largest = code > largest ? code : largest, least = code < least ? code : least;
      }
      packed |= static_cast<uint32_t>(Format::stored(code)) << (16 * half + 8 * sizeof(Scale) * i);
    }
  }
  if constexpr (Format::kRanged) {
    // A read first, past L1 and so no older than a moment: nearly every thread finds that it has nothing to add.
    const volatile int32_t* seen = status;
    if (largest > seen[kLargest]) atomicMax(status + kLargest, largest);
    if (least < seen[kLeast]) atomicMin(status + kLeast, least);
  }
  return packed;
}

template <class Format>
__device__ __forceinline__ void pack(const Source& source, uint32_t* packed, int32_t* status) {
  // A unit is scales, those of a whole slice also where the slice is shorter, then the chunks that are there.
  constexpr int kScaleWords = kSlice / Format::kGroup * static_cast<int>(sizeof(typename Format::Scale)) / 2;  // of a lane group
  constexpr int kUnitScaleWords = kLaneGroups * kScaleWords, kUnit = kUnitScaleWords + kChunks * kChunkWords;
  const int chunks = (source.k + kChunk - 1) / kChunk, slices = (chunks + kChunks - 1) / kChunks;
  const int tiles = (source.n + kRows - 1) / kRows;
  const int64_t tile_words = static_cast<int64_t>(chunks) * kChunkWords + static_cast<int64_t>(slices) * kUnitScaleWords;
  const int64_t unit_words = tiles * tile_words;
  const int64_t index = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (index >= unit_words) {
    // The kernel reads four chunks of every unit: zeros complete the last one.
    if (index < unit_words + (slices * kChunks - chunks) * kChunkWords) packed[index] = 0;
    return;
  }
  const int tile = static_cast<int>(index / tile_words), at = static_cast<int>(index % tile_words);
  const int slice = at / kUnit, in_unit = at % kUnit;
  if (in_unit < kUnitScaleWords) {
    const int word = slice * kScaleWords + in_unit % kScaleWords;
    packed[index] = scale_word<Format>(source, tile, word, in_unit / kScaleWords, status);
  } else {
    const int in_values = in_unit - kUnitScaleWords;
    const int chunk = slice * kChunks + in_values / kChunkWords;
    packed[index] = value_word<Format>(source, tile, chunk, in_values % kChunkWords);
  }
}

}  // namespace qgemm_mx::gemv_packing

// status[0] becomes 1 where a scale is outside the common range of qgemv_mx; in MXFP4 status[1] and status[2] the largest and the
// least scale code. The caller sets {0, 0, 255} first.
#define PACK_GEMV(name, Format)                                                                                        \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      pack_gemv_##name(const uint8_t* values, const void* scales, uint32_t* packed, int32_t* status, int n, int k,     \
                       int64_t value_stride, int64_t scale_stride) {                                                   \
    const qgemm_mx::gemv_packing::Source source{values, scales, n, k, value_stride, scale_stride};                     \
    qgemm_mx::gemv_packing::pack<qgemm_mx::gemv_packing::Format>(source, packed, status);                              \
  }

PACK_GEMV(mxfp4, Mxfp4)
PACK_GEMV(nvfp4, Nvfp4)
PACK_GEMV(int4_g128, Int4g128)
#undef PACK_GEMV
