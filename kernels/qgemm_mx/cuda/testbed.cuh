// testbed: a W4A16 product in the style of today's production kernels (dequantisation in the kernel, mma.sync, multistage
// cp.async copies, split K with a fixed-order reduction), in which each factor of the decomposition is a compile-time switch.
//
// D^T[N, M] = W[N, K] X^T[K, M]: the weight is the A operand of mma.m16n8k16, tokens are its n8. A block owns kRows rows of W
// and a part of K; a slab is kSlab of K, one stage of the ring. Lane (g, t) of a warp (g = lane / 4, t = lane % 4) takes the 16
// bytes, 32 k, of its rows g and g + 8 of the warp's 128 k; the order of K within a fragment is free as long as both operands
// agree, and here it is the lane's own. The packed operand is prepared by lab/testbed.py: nibbles within a 32-bit word are
// reordered for the extraction, scales lie [K/group][N].
//
// A factor that is off is replaced by its ideal, and the result is then wrong by design (all but layout_staging):
//   weight_load         a contiguous run of the same number of bytes a block, instead of rows of slabs and their scales
//   layout_staging      words go from memory to registers, instead of through shared memory
//   dequant_issue       raw words are the fragments
//   matrix_issue        fragments are folded by XOR, and no activations are read
//   epilogue_reduction  nothing is reduced or stored
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "ptx_memory.cuh"

namespace qgemm_mx::testbed {

enum Factor : unsigned {
  kWeightLoad = 1,
  kLayoutStaging = 2,
  kDequantIssue = 4,
  kMatrixIssue = 8,
  kEpilogueReduction = 16,
};

// How four pairs of E2M1 codes in a 32-bit word become BF16 pairs.
enum class Sequence {
  kShiftMask,  // shifts and masks place sign and magnitude, one multiply scales: what production kernels do
  kHostBits,   // the host ordered the bits so that fewer of them are needed
  kFp32,       // each code by arithmetic in FP32, then one conversion a pair
};

enum class Format { kMxfp4, kNvfp4, kInt4 };

template <Format format>
struct FormatTraits;
template <>
struct FormatTraits<Format::kMxfp4> {
  static constexpr int kGroup = 32, kScaleBytes = 1;
};
template <>
struct FormatTraits<Format::kNvfp4> {
  static constexpr int kGroup = 16, kScaleBytes = 1;
};
template <>
struct FormatTraits<Format::kInt4> {
  static constexpr int kGroup = 128, kScaleBytes = 2;
};

template <Format format, int tokens, int stages, int warps_n, int warps_k, unsigned factors, Sequence sequence,
          bool swizzle = true, bool pdl = false>
struct Config {
  static constexpr Format kFormat = format;
  static constexpr int kTokens = tokens, kStages = stages, kWarpsN = warps_n, kWarpsK = warps_k;
  static constexpr Sequence kSequence = sequence;
  static constexpr bool kSwizzle = swizzle, kPdl = pdl;
  static constexpr bool kRowsOfSlabs = factors & kWeightLoad, kStaged = factors & kLayoutStaging,
                        kDequantised = factors & kDequantIssue, kMultiplied = factors & kMatrixIssue,
                        kReduced = factors & kEpilogueReduction;

  static constexpr int kGroup = FormatTraits<format>::kGroup, kScaleBytes = FormatTraits<format>::kScaleBytes;
  static constexpr int kWarpK = 128;  // k of a warp in a slab: 4 lanes x 32 nibbles
  static constexpr int kSlab = kWarpK * kWarpsK, kRows = 16 * kWarpsN, kThreads = 32 * kWarpsN * kWarpsK;
  static constexpr int kTiles = kTokens / 8;  // n8 tiles of the mma
  static constexpr int kGroups = kSlab / kGroup;
  static constexpr int kWeightStage = kRows * kSlab / 2, kScaleStage = kGroups * kRows * kScaleBytes;
  static constexpr int kStage = kWeightStage + kScaleStage, kXStage = kTokens * kSlab * 2;
  static constexpr int kSmemBytes = kStages * (kStage + kXStage);
  // Scales of a lane in a slab and row: its 32 k are one MXFP4 group, two NVFP4 groups, a part of one INT4 group.
  static constexpr int kLaneScales = kGroup >= 32 ? 1 : 32 / kGroup;
  static constexpr int kReduceStride = kRows + 4;  // padding: the four t of a warp fall into different banks
  static_assert(kWarpsK * kTokens * kReduceStride * 4 <= kSmemBytes, "the reduction lives in the ring");
  static_assert(kGroup <= kWarpK, "a warp's part of a slab holds whole groups");
};

struct Arguments {
  const uint8_t* values;    // [N, K/2]
  const uint8_t* scales;    // [K/group, scale_stride], codes of one or two bytes
  const float* row_scale;   // [N], tensor scale of each row's shard; read by NVFP4 only
  const __nv_bfloat16* x;   // [M, K]
  __nv_bfloat16* y;         // [M, N]
  float* workspace;         // [split, token tiles, row tiles, tokens, rows]
  unsigned* arrivals;       // [token tiles, row tiles], zero before and after a call
  int m, n, k, scale_stride, split;
  unsigned long long run_bytes;  // bytes of values and scales together, from `values` on
  unsigned improbable;
};

// ---- loads ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_async(uint32_t smem, const void* gmem, bool valid) {
  // The source size 0 fills with zeros: rows and k beyond the operand multiply to nothing.
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_pending() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
  return v;
}

template <int kBytes>
__device__ __forceinline__ uint32_t load_scale(const uint8_t* address) {
  if constexpr (kBytes == 1) return *address;
  if constexpr (kBytes == 2) return *reinterpret_cast<const uint16_t*>(address);
  if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t*>(address);
}

// ---- dequantisation -------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Sign and magnitude of pair `j` at the sign, the two lowest exponent bits and the highest mantissa bit of a BF16 pair:
// the element times 2^-126, its subnormal 0.5 included.
template <Sequence sequence>
__device__ __forceinline__ uint32_t place(uint32_t q, int j) {
  if constexpr (sequence == Sequence::kHostBits) {
    // A half word holds the magnitudes of pairs 0, 1, 2, 3 at bits 6, 3, 0, 9 and their signs at 15, 12, 14, 13.
    if (j == 0) return q & 0x81C081C0u;
    if (j == 1) return (q << 3) & 0x81C081C0u;
    const uint32_t magnitude = (j == 2 ? q << 6 : q >> 3) & 0x01C001C0u;
    return ((j == 2 ? q << 1 : q << 2) & 0x80008000u) | magnitude;
  } else {
    const uint32_t top = q << (12 - 4 * j);
    return (top & 0x80008000u) | ((top & 0x70007000u) >> 6);
  }
}

__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  const uint32_t magnitude = code & 7;
  const float half = magnitude & 1 ? 0.5f : 0.0f;
  const float normal = __uint_as_float((126 + (magnitude >> 1)) << 23) * (1.0f + half);
  const float value = magnitude < 2 ? half : normal;
  return code & 8 ? -value : value;
}

__device__ __forceinline__ uint32_t both(uint32_t bf16) { return bf16 | bf16 << 16; }

// The factor of a lane's group that goes with `place`: scale x 2^126 (MXFP4) or scale x 2^118 (NVFP4, whose epilogue returns
// 2^8: the factor of the greatest scale would not fit). The wide path of MXFP4
// multiplies by 2^126 and by the scale, one after the other.
template <Format format>
struct Factors;

template <>
struct Factors<Format::kMxfp4> {
  uint32_t code;
  __device__ explicit Factors(uint32_t code) : code(code) {}
  __device__ uint32_t narrow_factor() const { return code * 0x00800080u + 0x3F003F00u; }  // exponent code + 126
  __device__ uint32_t wide_factor() const { return both(code == 255 ? 0x7FC0u : code << 7); }
};

template <>
struct Factors<Format::kNvfp4> {
  uint32_t code;
  __device__ explicit Factors(uint32_t code) : code(code) {}
  __device__ uint32_t narrow_factor() const {
    // E4M3 bits in a BF16 are the scale times 2^-120, subnormals included; 2^119 twice makes it 2^118.
    const uint32_t placed = both(((code & 0x7F) << 4) | ((code & 0x80) << 8));
    const uint32_t factor = multiply(multiply(placed, 0x7B007B00u), 0x7B007B00u);
    return (code & 0x7F) == 0x7F ? 0x7FC07FC0u : factor;
  }
};

// The four BF16 pairs of a 32-bit word.
template <class C, bool kWide>
__device__ __forceinline__ void dequantise(uint32_t q, uint32_t factor, uint32_t (&pair)[4]) {
  if constexpr (C::kFormat == Format::kInt4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // 128 + (code + 8) as BF16, minus 136: exact.
      const uint32_t biased = ((q >> (4 * j)) & 0x000F000Fu) ^ 0x43084308u;
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair[j]) : "r"(biased), "r"(0x43084308u));
    }
  } else if constexpr (C::kSequence == Sequence::kFp32) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scale = __uint_as_float(factor);
      const __nv_bfloat162 value = __floats2bfloat162_rn(decode_e2m1(q >> (4 * j)) * scale,
                                                         decode_e2m1(q >> (16 + 4 * j)) * scale);
      pair[j] = *reinterpret_cast<const uint32_t*>(&value);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t placed = place<C::kSequence>(q, j);
      pair[j] = multiply(kWide ? multiply(placed, 0x7E807E80u) : placed, factor);
    }
  }
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Packed weights of a lane in a slab: the words and scales of rows g and g + 8.
template <class C>
struct Packed {
  uint4 word[2];
  uint32_t scale[2][C::kLaneScales];
};

template <class C>
struct Block {
  // Copies of a thread a slab. Two words of weights in every tile shape: a lane consumes two.
  static constexpr int kRowChunks = C::kSlab / 32, kWeightCopies = 2;
  static constexpr int kScaleChunks = C::kRows * C::kScaleBytes / 16;  // of a group
  static constexpr int kXChunks = C::kSlab / 8;                        // of a token
  static constexpr int kXCopies = (C::kTokens * kXChunks + C::kThreads - 1) / C::kThreads;
  static_assert(C::kRows * kRowChunks == kWeightCopies * C::kThreads, "every thread copies the same number of words");
  static_assert(C::kGroups * kScaleChunks <= C::kThreads, "a thread copies one chunk of scales at most");
  static_assert(C::kThreads % kXChunks == 0 || kXCopies == 1, "copies of a thread share their place in a token's row");

  const Arguments& a;
  uint32_t smem;
  int warp_n, warp_k, g, t, tile, token_tile, part;
  int first, count;  // slabs of this block: [first, first + count)
  // What does not change from slab to slab: sources at slab 0, places in a stage, and whether they lie inside the operand.
  const uint8_t* weight_source[kWeightCopies];
  const uint8_t* scale_source;
  const __nv_bfloat16* x_source;
  uint32_t weight_place[kWeightCopies], x_place, word_offset, scale_offset, x_offset;
  int weight_k, scale_group, x_k, x_tokens_left;
  bool weight_row[kWeightCopies], scale_row;

  __device__ __forceinline__ Block(const Arguments& a, uint8_t* ring) : a(a), smem(ptx::smem_address(ring)) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    warp_n = warp % C::kWarpsN, warp_k = warp / C::kWarpsN, g = lane / 4, t = lane % 4;
    const int tiles = (a.n + C::kRows - 1) / C::kRows;
    tile = blockIdx.x % tiles, part = blockIdx.x / tiles, token_tile = blockIdx.y;
    // Without weight_load the blocks share the run of bytes evenly, whatever their number is.
    const long long slabs = C::kRowsOfSlabs ? (a.k + C::kSlab - 1) / C::kSlab
                                            : static_cast<long long>((a.run_bytes + C::kStage - 1) / C::kStage);
    const long long index = C::kRowsOfSlabs ? part : blockIdx.x, parts = C::kRowsOfSlabs ? a.split : gridDim.x;
    first = static_cast<int>(index * slabs / parts);
    count = static_cast<int>((index + 1) * slabs / parts) - first;

    const int chunk = threadIdx.x % kRowChunks;
    weight_k = chunk * 32;
#pragma unroll
    for (int j = 0; j < kWeightCopies; ++j) {
      const int row = (threadIdx.x + j * C::kThreads) / kRowChunks, n = tile * C::kRows + row;
      weight_row[j] = n < a.n;
      weight_source[j] = a.values + (weight_row[j] ? static_cast<long long>(n) * (a.k / 2) + chunk * 16 : 0);
      weight_place[j] = (row * kRowChunks + weight_chunk(row, chunk)) * 16;
    }
    scale_group = threadIdx.x / kScaleChunks;
    const int scale_n = tile * C::kRows + (threadIdx.x % kScaleChunks) * (16 / C::kScaleBytes);
    scale_row = threadIdx.x < C::kGroups * kScaleChunks && scale_n < a.scale_stride;
    scale_source = a.scales + (static_cast<long long>(scale_group) * a.scale_stride + scale_n) * C::kScaleBytes;

    const int token = threadIdx.x / kXChunks, x_index = threadIdx.x % kXChunks;
    x_k = x_index * 8;
    x_tokens_left = a.m - token_tile * C::kTokens - token;  // a copy of token + j * step is inside while j * step is less
    x_source = a.x + (static_cast<long long>(token_tile) * C::kTokens + token) * a.k + x_k;
    x_place = (token * kXChunks + (x_index & ~15) + x_chunk(token, x_index & 15)) * 16;

    word_offset = ((warp_n * 16 + g) * kRowChunks + weight_chunk(g, warp_k * 4 + t)) * 16;
    const int group = (warp_k * C::kWarpK + t * 32) / C::kGroup;
    scale_offset = C::kWeightStage + (group * C::kRows + warp_n * 16 + g) * C::kScaleBytes;
    x_offset = (g * kXChunks + warp_k * 16 + x_chunk(g, 4 * t)) * 16;
  }

  __device__ __forceinline__ uint32_t weight_stage(int stage) const { return smem + stage * C::kStage; }
  __device__ __forceinline__ uint32_t x_stage(int stage) const {
    return smem + C::kStages * C::kStage + stage * C::kXStage;
  }
  // Chunks of 16 bytes of a row: odd rows take the other half of the banks, or the eight lanes of a phase collide.
  // Rows of 64 bytes take turns by themselves.
  static __device__ __forceinline__ int weight_chunk(int row, int chunk) {
    return C::kSwizzle && C::kSlab >= 256 ? chunk ^ ((row & 1) << 2) : chunk;
  }
  static __device__ __forceinline__ int x_chunk(int token, int chunk) {
    return C::kSwizzle ? chunk ^ ((chunk >> 3) & 1) ^ ((token & 1) << 1) : chunk;
  }

  __device__ __forceinline__ void fetch_weights(int slab, int stage) const {
    const uint32_t base = weight_stage(stage);
    if constexpr (!C::kRowsOfSlabs) {
      const unsigned long long offset = static_cast<unsigned long long>(slab) * C::kStage + threadIdx.x * 16;
#pragma unroll
      for (int j = 0; j * C::kThreads < C::kStage / 16; ++j) {
        const unsigned long long at = offset + j * C::kThreads * 16;
        const bool mine = (j + 1) * C::kThreads <= C::kStage / 16 || threadIdx.x + j * C::kThreads < C::kStage / 16;
        if (mine) copy_async(base + (threadIdx.x + j * C::kThreads) * 16, a.values + at, at + 16 <= a.run_bytes);
      }
      return;
    }
    const bool inside = weight_k + slab * C::kSlab < a.k;
#pragma unroll
    for (int j = 0; j < kWeightCopies; ++j) {
      const bool valid = weight_row[j] && inside;
      copy_async(base + weight_place[j], weight_source[j] + (valid ? slab * (C::kSlab / 2) : 0), valid);
    }
    if (threadIdx.x < C::kGroups * kScaleChunks) {
      const bool valid = scale_row && scale_group + slab * C::kGroups < a.k / C::kGroup;
      const long long step = static_cast<long long>(slab) * (C::kGroups * C::kScaleBytes) * a.scale_stride;
      copy_async(base + C::kWeightStage + threadIdx.x * 16, valid ? scale_source + step : a.scales, valid);
    }
  }

  __device__ __forceinline__ void fetch_x(int slab, int stage) const {
    constexpr int kStep = C::kThreads / kXChunks;  // tokens between two copies of a thread
    const bool inside = x_k + slab * C::kSlab < a.k;
    const __nv_bfloat16* source = x_source + slab * C::kSlab;
#pragma unroll
    for (int j = 0; j < kXCopies; ++j) {
      if (kXCopies * C::kThreads > C::kTokens * kXChunks && threadIdx.x + j * C::kThreads >= C::kTokens * kXChunks) break;
      const bool valid = inside && j * kStep < x_tokens_left;
      // The swizzle of a token's row depends on its parity, and kStep tokens further it is the same for an even kStep.
      const uint32_t place = kStep % 2 == 0 || j == 0
                                 ? x_place + j * C::kThreads * 16
                                 : (x_place + j * C::kThreads * 16) ^ (C::kSwizzle && (j * kStep) % 2 ? 32u : 0u);
      copy_async(x_stage(stage) + place, valid ? source + static_cast<long long>(j) * kStep * a.k : a.x, valid);
    }
  }

  // From the ring to registers.
  __device__ __forceinline__ void read_stage(int stage, Packed<C>& p) const {
    const uint32_t base = weight_stage(stage);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      p.word[h] = load_shared(base + word_offset + h * (8 * kRowChunks * 16));
#pragma unroll
      for (int s = 0; s < C::kLaneScales; ++s) {
        const uint32_t at = base + scale_offset + (s * C::kRows + 8 * h) * C::kScaleBytes;
        if constexpr (C::kScaleBytes == 1) {
          asm volatile("ld.shared.u8 %0, [%1];" : "=r"(p.scale[h][s]) : "r"(at));
        } else {
          uint16_t code;
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(code) : "r"(at));
          p.scale[h][s] = code;
        }
      }
    }
  }

  // From memory to registers.
  __device__ __forceinline__ void read_memory(int slab, Packed<C>& p) const {
    p = {};
    if constexpr (!C::kRowsOfSlabs) {
      const unsigned long long offset = static_cast<unsigned long long>(slab) * C::kStage;
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned long long at = offset + (warp * 64 + h * 32 + lane) * 16;
        if (at + 16 <= a.run_bytes) p.word[h] = ptx::load_stream(reinterpret_cast<const uint4*>(a.values + at));
      }
      constexpr int kBytes = C::kScaleStage / C::kThreads;
      const unsigned long long at = offset + C::kWeightStage + threadIdx.x * kBytes;
      if (at + kBytes <= a.run_bytes) p.scale[0][0] = load_scale<kBytes>(a.values + at);
      return;
    }
    const int k = slab * C::kSlab + warp_k * C::kWarpK + t * 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int n = tile * C::kRows + warp_n * 16 + g + 8 * h;
      if (n >= a.n || k >= a.k) continue;
      const uint8_t* word = a.values + static_cast<long long>(n) * (a.k / 2) + k / 2;
      p.word[h] = ptx::load_stream(reinterpret_cast<const uint4*>(word));
#pragma unroll
      for (int s = 0; s < C::kLaneScales; ++s) {
        const long long at = static_cast<long long>(k / C::kGroup + s) * a.scale_stride + n;
        p.scale[h][s] = load_scale<C::kScaleBytes>(a.scales + at * C::kScaleBytes);
      }
    }
  }

  // MXFP4 scales of 4 and more, whose factor overflows, do not occur in trained layers: one decision for the warp, and the
  // common path pays one vote for it.
  __device__ __forceinline__ void consume(const Packed<C>& p, int stage, float (&acc)[C::kTiles][4], uint32_t& seen) const {
    if constexpr (C::kFormat == Format::kMxfp4 && C::kDequantised && C::kSequence != Sequence::kFp32) {
      if (__any_sync(0xFFFFFFFFu, p.scale[0][0] > 128 || p.scale[1][0] > 128)) {
        consume_path<true>(p, stage, acc, seen);
        return;
      }
    }
    consume_path<false>(p, stage, acc, seen);
  }

  template <bool kWide>
  __device__ __forceinline__ void consume_path(const Packed<C>& p, int stage, float (&acc)[C::kTiles][4],
                                               uint32_t& seen) const {
    // INT4 keeps its elements at their own magnitude, and a warp's 128 k are one group: the accumulators are scaled.
    constexpr bool kScaledSums = C::kFormat == Format::kInt4 && C::kDequantised && C::kMultiplied;
    float partial[kScaledSums ? C::kTiles : 1][4] = {};
    uint32_t factor[2][C::kLaneScales] = {};
    if constexpr (C::kDequantised && C::kFormat != Format::kInt4) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int s = 0; s < C::kLaneScales; ++s) {
          if constexpr (C::kSequence == Sequence::kFp32) {
            const uint32_t code = p.scale[h][s];
            factor[h][s] = code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23;
          } else {
            const Factors<C::kFormat> f(p.scale[h][s]);
            if constexpr (kWide) {
              factor[h][s] = f.wide_factor();
            } else {
              factor[h][s] = f.narrow_factor();
            }
          }
        }
    } else {
      // The scales must still have been loaded.
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int s = 0; s < C::kLaneScales; ++s) seen ^= p.scale[h][s];
    }

    const uint32_t words[2][4] = {{p.word[0].x, p.word[0].y, p.word[0].z, p.word[0].w},
                                  {p.word[1].x, p.word[1].y, p.word[1].z, p.word[1].w}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t row[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (C::kDequantised) {
          const int s = C::kLaneScales == 1 ? 0 : i * C::kLaneScales / 4;
          dequantise<C, kWide>(words[h][i], factor[h][s], row[h]);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) row[h][j] = words[h][i];
        }
      }
      if constexpr (!C::kMultiplied) {
        if constexpr (C::kDequantised) {
#pragma unroll
          for (int j = 0; j < 4; ++j) seen ^= row[0][j] ^ row[1][j];
        } else {
          seen ^= words[0][i] ^ words[1][i];
        }
        continue;
      }
#pragma unroll
      for (int tile8 = 0; tile8 < C::kTiles; ++tile8) {
        // Chunk 4t + i: i only touches the two bits that the swizzle permutes, so it can be applied last.
        const uint4 b = load_shared(((x_stage(stage) + x_offset) ^ (i * 16)) + tile8 * (8 * kXChunks * 16));
        float(&d)[4] = kScaledSums ? partial[kScaledSums ? tile8 : 0] : acc[tile8];
        mma(d, {row[0][0], row[1][0], row[0][1], row[1][1]}, b.x, b.y);
        mma(d, {row[0][2], row[1][2], row[0][3], row[1][3]}, b.z, b.w);
      }
    }
    if constexpr (kScaledSums) {
      const float upper = __uint_as_float(p.scale[0][0] << 16), lower = __uint_as_float(p.scale[1][0] << 16);
#pragma unroll
      for (int tile8 = 0; tile8 < C::kTiles; ++tile8) {
        acc[tile8][0] = fmaf(upper, partial[tile8][0], acc[tile8][0]);
        acc[tile8][1] = fmaf(upper, partial[tile8][1], acc[tile8][1]);
        acc[tile8][2] = fmaf(lower, partial[tile8][2], acc[tile8][2]);
        acc[tile8][3] = fmaf(lower, partial[tile8][3], acc[tile8][3]);
      }
    }
  }

  __device__ __forceinline__ void main_loop(float (&acc)[C::kTiles][4], uint32_t& seen) const {
    constexpr bool kRing = C::kStaged || C::kMultiplied;
    const auto fetch = [&](int i) {
      if (i < count) {
        if constexpr (C::kStaged) fetch_weights(first + i, i % C::kStages);
        if constexpr (C::kMultiplied) fetch_x(first + i, i % C::kStages);
      }
      commit();  // an empty group too, so that the count of pending groups stays that of the stages
    };
    if constexpr (C::kPdl) {
      // Weights do not depend on the kernel before: all that fit are requested before it is waited for.
      asm volatile("griddepcontrol.launch_dependents;");
      for (int i = 0; i < C::kStages - 1; ++i)
        if (i < count) fetch_weights(first + i, i);
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int i = 0; i < C::kStages - 1; ++i) {
        if (i < count) fetch_x(first + i, i);
        commit();
      }
    } else if constexpr (kRing) {
#pragma unroll
      for (int i = 0; i < C::kStages - 1; ++i) fetch(i);
    }
    if constexpr (C::kStaged) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        wait_pending<C::kStages - 2>();
        __syncthreads();
        fetch(i + C::kStages - 1);
        Packed<C> p;
        read_stage(i % C::kStages, p);
        consume(p, i % C::kStages, acc, seen);
      }
    } else {
      Packed<C> held[C::kStages];
#pragma unroll
      for (int d = 0; d < C::kStages; ++d)
        if (d < count) read_memory(first + d, held[d]);
#pragma unroll 1
      for (int base = 0; base < count; base += C::kStages) {
#pragma unroll
        for (int d = 0; d < C::kStages; ++d) {
          const int i = base + d;
          if (i >= count) break;
          if constexpr (C::kMultiplied) {
            wait_pending<C::kStages - 2>();
            __syncthreads();
            fetch(i + C::kStages - 1);
          }
          consume(held[d], d, acc, seen);
          if (i + C::kStages < count) read_memory(first + i + C::kStages, held[d]);
        }
      }
    }
  }

  // Sums over the warps of a row tile, then over the parts of K, both in a fixed order; one rounding to BF16.
  __device__ __forceinline__ void reduce_and_store(const float (&acc)[C::kTiles][4], float* shared) const {
    wait_pending<0>();
    __syncthreads();
#pragma unroll
    for (int tile8 = 0; tile8 < C::kTiles; ++tile8)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = tile8 * 8 + 2 * t + (c & 1), row = warp_n * 16 + g + 8 * (c >> 1);
        shared[(warp_k * C::kTokens + token) * C::kReduceStride + row] = acc[tile8][c];
      }
    __syncthreads();
    const int tiles = (a.n + C::kRows - 1) / C::kRows;
    const long long place = static_cast<long long>(token_tile) * tiles + tile;
    const long long slice = static_cast<long long>(gridDim.y) * tiles * C::kTokens * C::kRows;
    float* mine = a.workspace + part * slice + place * C::kTokens * C::kRows;
    for (int e = threadIdx.x; e < C::kTokens * C::kRows; e += C::kThreads) {
      const int token = e / C::kRows, row = e % C::kRows;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < C::kWarpsK; ++w) sum += shared[(w * C::kTokens + token) * C::kReduceStride + row];
      if (a.split == 1) {
        store(token, row, sum);
      } else if (token_tile * C::kTokens + token < a.m) {
        mine[e] = sum;
      }
    }
    if (a.split == 1) return;

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(a.arrivals + place, 1u) == static_cast<unsigned>(a.split) - 1;
      if (last) a.arrivals[place] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int e = threadIdx.x; e < C::kTokens * C::kRows; e += C::kThreads) {
      if (token_tile * C::kTokens + e / C::kRows >= a.m) continue;
      float sum = 0.0f;
      for (int other = 0; other < a.split; ++other)
        sum += __ldcg(a.workspace + other * slice + place * C::kTokens * C::kRows + e);
      store(e / C::kRows, e % C::kRows, sum);
    }
  }

  __device__ __forceinline__ void store(int token, int row, float sum) const {
    const int m = token_tile * C::kTokens + token, n = tile * C::kRows + row;
    if (m >= a.m || n >= a.n) return;
    if constexpr (C::kFormat == Format::kNvfp4) sum = sum * 256.0f * a.row_scale[n];
    a.y[static_cast<long long>(m) * a.n + n] = __float2bfloat16_rn(sum);
  }
};

template <class C>
__device__ __forceinline__ void run(const Arguments& a) {
  extern __shared__ __align__(128) uint8_t ring[];
  const Block<C> block(a, ring);
  float acc[C::kTiles][4] = {};
  uint32_t seen = 0;
  block.main_loop(acc, seen);
  if constexpr (C::kReduced) {
    if constexpr (!C::kMultiplied) acc[0][0] = __uint_as_float(seen);
    block.reduce_and_store(acc, reinterpret_cast<float*>(ring));
    if constexpr (C::kMultiplied && !C::kDequantised) {
      if (seen == a.improbable) a.y[0] = __float2bfloat16_rn(0.0f);
    }
  } else {
    // Nothing is stored unless the results fold to a value that the caller makes improbable: the loads stay alive.
    uint32_t folded = seen;
#pragma unroll
    for (int tile8 = 0; tile8 < C::kTiles; ++tile8)
#pragma unroll
      for (int c = 0; c < 4; ++c) folded ^= __float_as_uint(acc[tile8][c]);
    if (folded == a.improbable) a.y[0] = __float2bfloat16_rn(0.0f);
  }
}

}  // namespace qgemm_mx::testbed

// An entry of the testbed. Its name holds every switch: lab/testbed.py builds the same string.
#define TESTBED(entry, blocks_per_sm, ...)                                                                             \
  extern "C" __global__ void __launch_bounds__((qgemm_mx::testbed::Config<__VA_ARGS__>::kThreads), blocks_per_sm)      \
      entry(const uint8_t* values, const uint8_t* scales, const float* row_scale, const __nv_bfloat16* x,              \
            __nv_bfloat16* y, float* workspace, unsigned* arrivals, int m, int n, int k, int scale_stride, int split,  \
            unsigned long long run_bytes, unsigned improbable) {                                                       \
    const qgemm_mx::testbed::Arguments arguments{values, scales, row_scale, x, y, workspace, arrivals, m, n, k,        \
                                                 scale_stride, split, run_bytes, improbable};                          \
    qgemm_mx::testbed::run<qgemm_mx::testbed::Config<__VA_ARGS__>>(arguments);                                         \
  }
