// The decode kernel: y[M, N] = x[M, K] W[N, K]^T for at most 16 tokens, W in MXFP4, NVFP4 or INT4-g128, x and y in BF16 or FP16.
// Weights go through a ring of packed bytes to registers to mma.m16n8k16: a dequantised weight exists in no memory. The
// derivation, with the bits of a word, is in kernels/README.md; the packed layout in qgemm_mx/gemv_layout.py.
//
// The weight is the A operand, 16 rows of W. With fewer than 8 tokens a column of B (n8) is a token and a scale group, and every
// group has an accumulator of its own, of which the columns of that group are used: a scale is applied once to a sum instead of to
// every weight. From 8 tokens on a column is a token.
//
// A unit is 16 rows x 256 k, contiguous in memory: scales, then four chunks of 64 k (512 bytes, in which a lane's 16 bytes are its
// fragments of four steps of 16 k). A team (a block, or a cluster whose blocks share K) owns row tiles; a warp owns slices of 256 k
// and walks the tiles, so that the activations of a slice are loaded once for all of them. Each warp has a ring of its own: no warp
// waits for another before the sums over warps are taken, in the order of the warps, at the end.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx_memory.cuh"

namespace qgemm_mx::gemv {

enum class Format { kMxfp4, kNvfp4, kInt4 };

constexpr int group_of(Format format) { return format == Format::kMxfp4 ? 32 : format == Format::kNvfp4 ? 16 : 128; }
constexpr int scale_bytes_of(Format format) { return format == Format::kInt4 ? 2 : 1; }

constexpr int kRows = 16, kSlice = 256, kChunk = 64, kChunks = kSlice / kChunk, kChunkBytes = kRows * kChunk / 2;

// How units come: copied by the lanes that use them, which starts sooner, or by the copy engine, which streams faster.
enum class Ring { kAsync, kBulk };

// scaled: for the ablation alone, every weight is multiplied by its scale, as is usual.
template <Format format, class Activation, int tokens, int ranks, Ring ring, bool scaled = false>
struct Config {
  using Act = Activation;
  static constexpr Format kFormat = format;
  static constexpr bool kHalf = sizeof(Activation) == 2 && !__is_same(Activation, __nv_bfloat16);
  static constexpr int kTokens = tokens, kRanks = ranks;
  static constexpr bool kBulk = ring == Ring::kBulk, kScaled = scaled;
  static constexpr int kAsyncDepth = 2;  // units of a warp in flight: the argument of cp.async.wait_group is a constant
  static constexpr int kGroup = group_of(format), kScaleBytes = scale_bytes_of(format);
  static constexpr bool kE2m1 = format != Format::kInt4;
  static constexpr int kColumnTiles = (tokens + 7) / 8;
  // Groups that share the columns of B: a set. INT4 needs no columns for groups: its group is half a slice.
  static constexpr int kSet = kE2m1 && tokens < 8 && !scaled ? 8 / tokens : 1;
  static constexpr int kSetK = kSet * kGroup, kSets = kSlice / kSetK, kStepsOfSet = kSetK / 16;
  // k that are there or not there as one, K being a multiple of 32, and that are of one group.
  static constexpr int kWindow = kGroup == 16 ? 16 : 32, kStepsOfWindow = kWindow / 16, kWindows = kSlice / kWindow;
  // Steps of a set one behind the other would wait for each other: two chains.
  static constexpr int kChains = kStepsOfSet >= 4 && tokens <= 8 ? 2 : 1;
  static constexpr int kUnitScaleBytes = kRows * kSlice / kGroup * kScaleBytes;
  static constexpr int kUnitBytes = kUnitScaleBytes + kChunks * kChunkBytes;
  static constexpr int kScaleWords = kSet >= 2 || kScaleBytes == 2 ? kSets : kSets / 2;  // words that a lane reads
  // Columns 2t and 2t + 1 of a lane are one token while a token has two columns or more.
  static constexpr int kLaneTokens = kSet >= 2 ? 1 : 2, kTokenLanes = kSet >= 2 ? kSet / 2 : 1;
  // No other lane reads the scale words of a lane: what it copies itself needs no barrier.
  static constexpr bool kOwnScales = kSet == 8 && !kBulk;
  static constexpr bool kAhead = kSet >= 2 && !kHalf;  // the activations of the next slice are loaded ahead
  // With 16 tokens B takes 64 registers, and a unit is read from the ring piece by piece, or registers would spill.
  static constexpr bool kByChunk = tokens > 8 || (kHalf && kGroup == 16 && tokens == 4);
  // Sums of a lane: value v is column tile, token of the lane and row half, from the slowest to the fastest.
  static constexpr int kValues = kColumnTiles * 2 * kLaneTokens, kTileSums = kValues * 32;
};

// Parameters are read through a cache of 64-byte lines that starts empty: the first 48 bytes are all that the first loads need,
// the next 64 are touched while those are under way. Offsets into the weight have 32 bits: the host refuses a weight of 4 GiB.
// Every warp has a slice and a tile.
struct Arguments {
  const uint8_t* weight;
  const void* x;
  uint32_t tile_bytes, walker_stride, stride;  // to the next row tile; to the tile of the next walker; to a warp's own next tile
  uint32_t ring_offset;                        // bytes of sums in front of the rings
  int tiles_per_team, extra_teams;             // the first extra_teams teams have one tile more
  int slices;                                  // of 256 k
  // Warps that share K; units in flight a warp; warps that share a slice and take tiles in turn; whether all units that may be in
  // flight are requested before the kernel ahead is waited for.
  uint8_t warps, depth, walkers, early;
  void* y;
  long long y_stride, x_stride;  // elements
  const void* bias;              // [N] in the activations' type, or null
  const float* row_scale;        // [N], tensor scale of each row's shard; read by NVFP4 only
  int teams, turn_tiles;         // tiles whose sums have room in shared memory
  int k, n;
  int m, wide;  // wide: scales outside the common range, every slice takes the exact path
};

// ---- arithmetic of pairs --------------------------------------------------------------------------------------------

template <bool kHalf>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (kHalf) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// The four pairs of a word: rows g, g + 8, g, g + 8 of a step. E2M1 elements come out times 2^-126 (BF16) or 2^-14 (FP16): sign
// and magnitude at the sign, the lowest exponent bits and the highest mantissa bit, subnormals included.
template <class C>
__device__ __forceinline__ void place(uint32_t q, uint32_t (&pair)[4]) {
  if constexpr (!C::kE2m1) {
    // A power of two whose last place is one, plus code + 8, minus that: exact.
    constexpr uint32_t kBias = C::kHalf ? 0x64086408u : 0x43084308u;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t biased = ((q >> (4 * j)) & 0x000F000Fu) ^ kBias;
      if constexpr (C::kHalf) {
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair[j]) : "r"(biased), "r"(kBias));
      } else {
        asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair[j]) : "r"(biased), "r"(kBias));
      }
    }
  } else {
    // Stored bits are such that pairs come out of XORs: one rotation, three shifts to the left and four LOP3 for all of them.
    constexpr uint32_t kMask = 0x81C081C0u;
    const uint32_t r = __funnelshift_l(q, q, 10);
    pair[0] = q & kMask;
    pair[1] = (q << 4) & kMask;
    pair[2] = (r ^ (q << 6)) & kMask;
    pair[3] = (r ^ (r << 2)) & kMask;
    if constexpr (C::kHalf) {
#pragma unroll
      for (int j = 0; j < 4; ++j) pair[j] = (pair[j] & 0x80008000u) | ((pair[j] << 3) & 0x0E000E00u);
    }
  }
}

template <bool kHalf>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The first of a chain: sums begin at zero without a register that says so.
template <bool kHalf>
__device__ __forceinline__ void mma_first(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
}

// The scale of `byte` of a word in FP32, times the power of two that placed elements and activations lack, but for what `Result`
// adds: MXFP4 codes are packed 62 ahead (mod 256), which is that power already; NVFP4 scales are multiplied by 2^7.
template <class C, bool kExact>
__device__ __forceinline__ float scale_of(uint32_t word, int byte, int wide) {
  if constexpr (C::kFormat == Format::kInt4) {
    return __uint_as_float(byte == 0 ? word << 16 : word & 0xFFFF0000u);
  } else if constexpr (C::kFormat == Format::kMxfp4) {
    const uint32_t at = (byte < 3 ? word << (23 - 8 * byte) : word >> 1) & 0x7F800000u;
    if constexpr (!kExact) return __uint_as_float(at);
    const uint32_t code = ((at >> 23) - 62) & 255;
    const float scale = __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
    return C::kHalf ? (wide ? scale : scale * 0x1p62f) : scale;
  } else {
    // Packed as unsigned E5M3: in an FP32 the scale times 2^-105, zero included; 255 stands for NaN.
    const uint32_t at = (byte < 3 ? word << (20 - 8 * byte) : word >> 4) & 0x0FF00000u;
    if constexpr (!kExact) return __uint_as_float(at) * 0x1p112f;
    if (at == 0x0FF00000u) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(at) * (C::kHalf ? 0x1p112f : 0x1p86f);
  }
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

// What a lane has of a unit in registers.
template <class C, bool kByChunk = C::kByChunk>
struct Unit {
  uint4 chunk[kChunks];  // four steps each
  uint32_t scale[C::kScaleWords];
};
template <class C>
struct Unit<C, true> {
  uint2 half;  // of a chunk: two steps
  uint32_t scale;
};

template <class C>
struct Warp {
  const Arguments& a;
  int lane, g, t;

  __device__ __forceinline__ explicit Warp(const Arguments& a) : a(a) {
    lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  }

  __device__ __forceinline__ int chunks_of(int slice) const {
    return min(kChunks, (a.k + kChunk - 1) / kChunk - slice * kChunks);
  }

  // Byte of the unit with the scales of this lane's columns in word i of those that it reads.
  __device__ __forceinline__ int scale_at(int i) const {
    constexpr int kRowBytes = C::kUnitScaleBytes / 8;  // of g and g + 8
    if constexpr (C::kSet >= 2) return g * kRowBytes + (i * (C::kSet / 2) + t % (C::kSet / 2)) * 4;
    return g * kRowBytes + i * 4;
  }
  __device__ __forceinline__ uint4 read_chunk(const uint8_t* slot, int c) const {
    return *reinterpret_cast<const uint4*>(slot + C::kUnitScaleBytes + c * kChunkBytes + lane * 16);
  }
  __device__ __forceinline__ void read(const uint8_t* slot, Unit<C>& unit) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) unit.chunk[c] = read_chunk(slot, c);
    if constexpr (C::kSet >= 2) {
#pragma unroll
      for (int i = 0; i < C::kScaleWords; ++i) unit.scale[i] = *reinterpret_cast<const uint32_t*>(slot + scale_at(i));
    } else if constexpr (C::kScaleWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(slot + scale_at(0));
      unit.scale[0] = v.x, unit.scale[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < C::kScaleWords; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(slot + scale_at(i));
        unit.scale[i] = v.x, unit.scale[i + 1] = v.y, unit.scale[i + 2] = v.z, unit.scale[i + 3] = v.w;
      }
    }
  }

  // b0 and b1 of the steps of a window, for one column, in the instruction's own order of K. What is not there is read from where
  // something is: a column of no token is never stored, and windows beyond K are zeroed after the load, so that no load waits for a
  // condition.
  __device__ __forceinline__ void load_x(int token, int k, uint32_t (&b)[C::kStepsOfWindow][2]) const {
    const typename C::Act* row =
        static_cast<const typename C::Act*>(a.x) + (C::kTokens == 1 ? 0 : min(token, a.m - 1) * a.x_stride) + (k < a.k ? k : 0);
#pragma unroll
    for (int s = 0; s < C::kStepsOfWindow; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) b[s][h] = __ldg(reinterpret_cast<const uint32_t*>(row + 16 * s + 8 * h + 2 * t));
  }

  // B of a slice. With columns for groups a lane has the activations of its own group of a set alone: the accumulator of a group has
  // products with the activations of all of them, and only those in the group's own columns are used.
  static constexpr int kHeld = C::kSet >= 2 ? C::kSets : C::kWindows;
  struct Held {
    uint32_t b[C::kColumnTiles][kHeld][C::kStepsOfWindow][2];
    bool exact;
  };

  __device__ __forceinline__ int first_k(int slice, int i) const {
    if constexpr (C::kSet >= 2) return slice * kSlice + i * C::kSetK + g % C::kSet * C::kGroup;
    return slice * kSlice + i * C::kWindow;
  }
  __device__ __forceinline__ void load(int slice, Held& held) const {
#pragma unroll
    for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        load_x(C::kSet >= 2 ? g / C::kSet : tile8 * 8 + g, first_k(slice, i), held.b[tile8][i]);
  }

  // Scales the activations and finds out which path they take; zeros those beyond K.
  __device__ __forceinline__ void prepare(int slice, Held& held) const {
    const auto each = [&](auto use) {
#pragma unroll
      for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
#pragma unroll
          for (int s = 0; s < C::kStepsOfWindow; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h) use(i, held.b[tile8][i][s][h]);
    };
    if (slice * kSlice + kSlice > a.k) each([&](int i, uint32_t& pair) { pair = first_k(slice, i) < a.k ? pair : 0; });
    held.exact = C::kE2m1 && a.wide;
    if constexpr (C::kE2m1 && !C::kHalf) {
      // Common: 2^64 (NVFP4: 2^100) times the activations stays inside BF16, and products with placed elements inside FP32.
      constexpr bool kMx = C::kFormat == Format::kMxfp4;
      constexpr uint32_t kLarge = kMx ? 0x5E80u : 0x4C80u, kCommon = kMx ? 0x3080u : 0x1E80u;  // 2^62, 2^26; 2^-30, 2^-66
      uint32_t greatest = 0;
      each([&](int, uint32_t& pair) { greatest = __vmaxu2(greatest, pair & 0x7FFF7FFFu); });
      const uint32_t one = __reduce_max_sync(~0u, max(greatest & 0xFFFFu, greatest >> 16));
      held.exact |= one >= kLarge || (one < kCommon && one > 0);
      if (!held.exact && !C::kScaled)
        each([&](int, uint32_t& pair) { pair = multiply<false>(pair, kMx ? 0x5F805F80u : 0x71807180u); });
    }
  }

  using Sums = float[C::kColumnTiles][2][C::kLaneTokens];  // [column tile][row half][token of the lane]

  template <bool kExact>
  __device__ __forceinline__ void fragments(const uint8_t* slot, Unit<C>& unit, int index, uint32_t (&pair)[4]) const {
    if constexpr (C::kByChunk) {
      if (index % 2 == 0)
        unit.half = *reinterpret_cast<const uint2*>(slot + C::kUnitScaleBytes + index / 4 * kChunkBytes + lane * 16 +
                                                    index % 4 * 4);
      place<C>(index % 2 == 0 ? unit.half.x : unit.half.y, pair);
    } else {
      const uint4 chunk = unit.chunk[index / 4];
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      place<C>(words[index % 4], pair);
    }
    if constexpr ((kExact || C::kScaled) && C::kE2m1 && !C::kHalf) {
#pragma unroll
      for (int j = 0; j < 4; ++j) pair[j] = multiply<false>(pair[j], 0x7E807E80u);  // 2^126
    }
  }

  template <bool kExact>
  __device__ __forceinline__ void multiply_unit(const uint8_t* slot, Unit<C>& unit, const Held& held,
                                                Sums& acc) const {
    constexpr int kSetsOfWord = C::kSet >= 2 || C::kScaleBytes == 2 ? 1 : 2;
#pragma unroll
    for (int set = 0; set < C::kSets; ++set) {
      uint32_t scales;
      if constexpr (C::kByChunk) {
        if (set % kSetsOfWord == 0) unit.scale = *reinterpret_cast<const uint32_t*>(slot + scale_at(set / kSetsOfWord));
        scales = unit.scale;
      } else {
        scales = unit.scale[set / kSetsOfWord];
      }
      const auto scale = [&](int half, int c) {
        if constexpr (C::kScaleBytes == 2) return scale_of<C, kExact>(scales, half, a.wide);
        return scale_of<C, kExact>(scales, 2 * half + (C::kSet >= 2 ? c : set % 2), a.wide);
      };
      if constexpr (C::kSet >= 2) {
        float factor[2][2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int c = 0; c < 2; ++c) factor[half][c] = scale(half, c);
#pragma unroll
        for (int group = 0; group < C::kSet; ++group) {
          float sum[4];
#pragma unroll
          for (int s = 0; s < C::kStepsOfWindow; ++s) {
            uint32_t pair[4];
            fragments<kExact>(slot, unit, (set * C::kSet + group) * C::kStepsOfWindow + s, pair);
            const uint32_t b0 = held.b[0][set][s][0], b1 = held.b[0][set][s][1];
            if (s == 0) {
              mma_first<C::kHalf>(sum, pair, b0, b1);
            } else {
              mma<C::kHalf>(sum, pair, b0, b1);
            }
          }
          // Column 2t + c of this lane is of this group or of another.
          const int c = group % 2;
          if (C::kSet == 2 || t % (C::kSet / 2) == group / 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
              acc[0][half][0] = fmaf(factor[half][c], exactly<kExact>(sum[2 * half + c]), acc[0][half][0]);
          }
        }
      } else {
        float part[C::kChains][C::kColumnTiles][4];
        uint32_t factors[2];  // of pairs in rows g, g + 8
        constexpr bool kScaled = C::kScaled && !kExact;
        if constexpr (kScaled) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t code = ((scales >> (16 * half + 8 * (set % 2))) - 62) & 0xFF;
            factors[half] = (code == 0 ? 0x0040u : code << 7) * 0x00010001u;
          }
        }
#pragma unroll
        for (int step = 0; step < C::kStepsOfSet; ++step) {
          const int index = set * C::kStepsOfSet + step, window = index / C::kStepsOfWindow, s = index % C::kStepsOfWindow;
          uint32_t pair[4];
          fragments<kExact>(slot, unit, index, pair);
          if constexpr (kScaled) {
#pragma unroll
            for (int j = 0; j < 4; ++j) pair[j] = multiply<false>(pair[j], factors[j % 2]);
          }
#pragma unroll
          for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8) {
            const uint32_t b0 = held.b[tile8][window][s][0], b1 = held.b[tile8][window][s][1];
            if (step < C::kChains) {
              mma_first<C::kHalf>(part[step][tile8], pair, b0, b1);
            } else {
              mma<C::kHalf>(part[step % C::kChains][tile8], pair, b0, b1);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = kScaled ? 1.0f : scale(half, 0);
#pragma unroll
          for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float sum = part[0][tile8][2 * half + c];
              if constexpr (C::kChains == 2) sum += part[1][tile8][2 * half + c];
              acc[tile8][half][c] = fmaf(factor, exactly<kExact>(sum), acc[tile8][half][c]);
            }
        }
      }
    }
  }
  template <bool kExact>
  static __device__ __forceinline__ float exactly(float sum) {
    return kExact && C::kHalf && C::kE2m1 ? sum * 0x1p14f : sum;
  }
};

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// ---- a result ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void add(float4& to, float4 from) { to.x += from.x, to.y += from.y, to.z += from.z, to.w += from.w; }

// What four lanes of a value become: the columns of one row. e counts tile of the turn, value and g from the slowest to the fastest.
template <class C>
struct Result {
  static constexpr int kTileQuads = C::kValues * 8;
  typename C::Act* y;  // null beyond N
  float factor, bias;
  int value;

  __device__ __forceinline__ Result(const Arguments& a, int team, int base, int e) {
    const int tile = e / kTileQuads, half = e / 8 % 2;
    const int row = (team + (base + tile) * a.teams) * kRows + half * 8 + e % 8;
    const bool there = row < a.n;
    value = e / 8 % C::kValues;
    y = there ? static_cast<typename C::Act*>(a.y) + row : nullptr;
    constexpr float kFinish = C::kFormat == Format::kMxfp4 ? (C::kHalf ? 0x1p-48f : 1.0f)
                              : C::kFormat == Format::kNvfp4 ? (C::kHalf ? 0x1p7f : 0x1p19f) : 1.0f;
    factor = C::kHalf && C::kE2m1 && a.wide ? (C::kFormat == Format::kNvfp4 ? 0x1p-7f : 1.0f) : kFinish;
    if constexpr (C::kFormat == Format::kNvfp4) factor *= there ? a.row_scale[row] : 0.0f;
    bias = a.bias && there ? static_cast<float>(static_cast<const typename C::Act*>(a.bias)[row]) : 0.0f;
  }

  __device__ __forceinline__ void store(const Arguments& a, float4 sum) const {
    if (!y) return;
    const float each[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i += C::kTokenLanes) {
      float one = each[i];
      if constexpr (C::kTokenLanes >= 2) one += each[i + 1];
      if constexpr (C::kTokenLanes == 4) one += each[i + 2] + each[i + 3];
      const int token =
          C::kLaneTokens == 1 ? i / C::kTokenLanes : value / (2 * C::kLaneTokens) * 8 + 2 * i + value / 2 % C::kLaneTokens;
      if (token < a.m) y[token * a.y_stride] = typename C::Act(fmaf(one, factor, bias));
    }
  }
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void run(const Arguments& a) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(128) uint8_t shared[];
  const Warp<C> warp(a);
  const int index = threadIdx.x / 32, walker = threadIdx.y, lane = warp.lane;  // which slices, which tiles
  const int rank = C::kRanks == 1 ? 0 : blockIdx.x % C::kRanks, team = blockIdx.x / C::kRanks;
  const int first_slice = rank * a.warps + index, step = C::kRanks * a.warps;

  // The ring of this warp. Its units come in the order in which the warp takes them: tiles of a turn fastest, so that the
  // activations of a slice serve all tiles; then slices; then turns.
  const int depth = C::kBulk ? a.depth : C::kAsyncDepth, linear = walker * a.warps + index;
  uint8_t* slots = shared + a.ring_offset + linear * depth * C::kUnitBytes;
  uint64_t* full =
      reinterpret_cast<uint64_t*>(shared + a.ring_offset + a.warps * a.walkers * depth * C::kUnitBytes) + linear * depth;
  const auto fetch = [&](uint8_t* slot, uint64_t* barrier, uint32_t at, int slice) {
    if constexpr (C::kBulk) {
      if (lane == 0) {
        const uint32_t bytes = C::kUnitScaleBytes + warp.chunks_of(slice) * kChunkBytes;
        ptx::mbarrier_arrive_expect(barrier, bytes);
        ptx::bulk_load(slot, a.weight + at, bytes, barrier);
      }
    } else {
      // Chunks beyond K are read too, from what follows: their activations are zeros. The last unit has as much behind it.
      const uint8_t* own = a.weight + (at + lane * 16);
      uint8_t* to = slot + lane * 16;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
        ptx::copy_async<16>(to + C::kUnitScaleBytes + c * kChunkBytes, own + C::kUnitScaleBytes + c * kChunkBytes);
      if constexpr (C::kOwnScales) {
#pragma unroll
        for (int i = 0; i < C::kScaleWords; ++i) ptx::copy_async<4>(slot + warp.scale_at(i), a.weight + (at + warp.scale_at(i)));
      } else if constexpr (C::kUnitScaleBytes >= 128) {
        constexpr int kShare = C::kUnitScaleBytes / 32;
        ptx::copy_async<kShare>(slot + lane * kShare, a.weight + (at + lane * kShare));
      } else {
        if (lane < C::kUnitScaleBytes / 4) ptx::copy_async<4>(slot + lane * 4, a.weight + (at + lane * 4));
      }
    }
  };
  const auto commit = [&] {
    if constexpr (!C::kBulk) asm volatile("cp.async.commit_group;" ::: "memory");
  };

  // Weights do not depend on the kernel before: the first unit is requested before all else.
  if constexpr (C::kBulk) {
    if (lane == 0) {
      for (int d = 0; d < depth; ++d) ptx::mbarrier_init(full + d, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
  const uint32_t first_at = team * a.tile_bytes + walker * a.walker_stride + first_slice * C::kUnitBytes;
  typename Warp<C>::Held held, next;
  if (!a.early) {
    // The activations are what the first product waits for longest: their way to the tensor core is the longer one.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    warp.load(first_slice, held);
  }
  fetch(slots, full, first_at, first_slice);
  commit();
  asm volatile("griddepcontrol.launch_dependents;");
  if constexpr (C::kRanks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  // Brings the second line of parameters: otherwise the last store waits for it.
  asm volatile("" ::"l"(a.y), "l"(a.row_scale), "r"(a.n), "r"(a.wide));

  const int tiles = a.tiles_per_team + (team < a.extra_teams);
  struct Ahead {
    int base, slice, tile;
    uint32_t at;  // byte of the unit in the weight
  } ahead{0, first_slice, walker, first_at};
  const auto advance = [&] {
    ahead.at += a.stride;
    if ((ahead.tile += a.walkers) >= min(a.turn_tiles, tiles - ahead.base)) {
      if ((ahead.slice += step) >= a.slices) ahead.slice = first_slice, ahead.base += a.turn_tiles;
      if (ahead.base + walker >= tiles) ahead.base = tiles;
      ahead.tile = walker;
      ahead.at = (team + (ahead.base + walker) * a.teams) * a.tile_bytes + ahead.slice * C::kUnitBytes;
    }
  };
  const auto request = [&](uint8_t* slot, uint64_t* barrier) {
    if (ahead.base < tiles) {
      fetch(slot, barrier, ahead.at, ahead.slice);
      advance();
    }
    commit();
  };
  advance();
#pragma unroll 1
  for (int d = 1; d < depth; ++d) request(slots + d * C::kUnitBytes, full + d);
  if (a.early) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    warp.load(first_slice, held);
  }

  float* sums = reinterpret_cast<float*>(shared);  // [warp][tile of the turn][value][lane]
  const int warp_sums = a.turn_tiles * C::kTileSums;
  float* teamed = sums + a.warps * warp_sums;  // [rank][own tile of the turn][value][lane]: what the ranks send for the own tiles
  uint32_t slot = 0, phase = 0;
  // One copy of the loop body in the code, and the exact path in a loop of its own: what an unrolled body would cost in
  // instruction fetches is more than it saves.
  const auto walk = [&](auto exact, int count, bool first) {
    const float* last = sums + index * warp_sums + count * C::kTileSums;
#pragma unroll 1
    for (float* mine = sums + index * warp_sums + walker * C::kTileSums + lane; mine < last; mine += a.walkers * C::kTileSums) {
      Unit<C> unit;
      uint8_t* source = slots + slot * C::kUnitBytes;
      if constexpr (C::kBulk) {
        ptx::mbarrier_wait(full + slot, phase);
      } else {
        asm volatile("cp.async.wait_group %0;" ::"n"(C::kAsyncDepth - 1) : "memory");
        if constexpr (!C::kOwnScales) __syncwarp();
      }
      if constexpr (!C::kByChunk) warp.read(source, unit);
      // Every lane has read the slot before the next unit may land in it. The copy engine does not wait for loads that are
      // issued and not yet done: without the fence it overtook them where loads of activations held them up.
      const auto release = [&] {
        if constexpr (C::kBulk) ptx::fence_proxy_async();
        if constexpr (!C::kOwnScales) __syncwarp();
        request(slots + slot * C::kUnitBytes, full + slot);
        if (++slot == depth) slot = 0, phase ^= 1;
      };
      if constexpr (!C::kByChunk) release();
      typename Warp<C>::Sums acc = {};
      warp.template multiply_unit<decltype(exact)::value>(source, unit, held, acc);
      if constexpr (C::kByChunk) release();
#pragma unroll
      for (int v = 0; v < C::kValues; ++v) {
        const float value = acc[v / (2 * C::kLaneTokens)][v % 2][v / 2 % C::kLaneTokens];
        mine[v * 32] = first ? value : mine[v * 32] + value;
      }
    }
  };
  const auto one_slice = [&] { return first_slice + step >= a.slices; };  // then what is held serves every turn
  bool joined = false;
  // Where the first result goes is worked out while the first units are under way.
  using Result = gemv::Result<C>;
  constexpr int kTileQuads = Result::kTileQuads;
  constexpr bool kEarlyResult = C::kTokens <= 8;  // with 16 tokens registers are short
  // Element `own` of those of this rank, counted over all tiles of the turn.
  const auto of_turn = [&](int own) {
    return C::kRanks == 1 ? own : (own / kTileQuads * C::kRanks + rank) * kTileQuads + own % kTileQuads;
  };
  const Result first_result(a, team, 0, of_turn(32 * linear + lane));
  for (int base = 0; base < tiles; base += a.turn_tiles) {
    const int count = min(a.turn_tiles, tiles - base);
    if (walker < count) {
#pragma unroll 1
      for (int slice = first_slice; slice < a.slices; slice += step) {
        if (!one_slice() && (base > 0 || slice > first_slice)) {
          if constexpr (C::kAhead) {
            held = next;
          } else {
            warp.load(slice, held);
          }
        }
        if (!one_slice() || base == 0) warp.prepare(slice, held);
        if constexpr (C::kAhead) {
          if (!one_slice()) warp.load(slice + step < a.slices ? slice + step : first_slice, next);
        }
        if (C::kE2m1 && held.exact) {
          walk(Constant<true>{}, count, slice == first_slice);
        } else {
          walk(Constant<false>{}, count, slice == first_slice);
        }
      }
    }
    // Over the warps in their order; then over the lanes of a token; then over the blocks of a cluster.
    __syncthreads();
    const int threads = 32 * a.warps * a.walkers, active = min(a.warps, a.slices - rank * a.warps);
    // Opaque here, or what follows from it is worked out before the walk and takes registers through it.
    int thread = 32 * linear + lane;
    asm volatile("" : "+r"(thread));
    const auto total = [&](int e) {
      const float4* quads = reinterpret_cast<const float4*>(sums) + e;
      if constexpr (C::kTokens <= 4) {
        float4 part[16];
#pragma unroll
        for (int w = 0; w < 16; ++w) part[w] = w < active ? quads[w * (warp_sums / 4)] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < 8; ++w) add(part[w], part[w + 8]);
#pragma unroll
        for (int w = 0; w < 4; ++w) add(part[w], part[w + 4]);
        add(part[0], part[2]), add(part[1], part[3]), add(part[0], part[1]);
        return part[0];
      } else {
        float4 sum = quads[0];
#pragma unroll 8
        for (int w = 1; w < active; ++w) add(sum, quads[w * (warp_sums / 4)]);
        return sum;
      }
    };
    if constexpr (C::kRanks == 1) {
      if (thread < count * kTileQuads)
        (kEarlyResult && base == 0 ? first_result : Result(a, team, base, thread)).store(a, total(thread));
      for (int e = thread + threads; e < count * kTileQuads; e += threads) Result(a, team, base, e).store(a, total(e));
    } else {
      // Tile i of the turn belongs to rank i % ranks, which adds what the ranks send it in the order of the ranks.
      namespace cg = cooperative_groups;
      cg::cluster_group cluster = cg::this_cluster();
      if (!joined) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
      joined = true;
      float4* sent = reinterpret_cast<float4*>(teamed);
      const int room = (a.turn_tiles + C::kRanks - 1) / C::kRanks * kTileQuads;
      for (int e = thread; e < count * kTileQuads; e += threads) {
        const int tile = e / kTileQuads;
        cluster.map_shared_rank(sent, tile % C::kRanks)[rank * room + tile / C::kRanks * kTileQuads + e % kTileQuads] = total(e);
      }
      cluster.sync();
      const int mine = (count - rank + C::kRanks - 1) / C::kRanks * kTileQuads;
      for (int e = thread; e < mine; e += threads) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int r = 0; r < C::kRanks; ++r) add(sum, sent[r * room + e]);
        (kEarlyResult && base == 0 && e == thread ? first_result : Result(a, team, base, of_turn(e))).store(a, sum);
      }
    }
    if (base + a.turn_tiles < tiles) {  // the sums are read before the next turn writes them
      if constexpr (C::kRanks > 1) {
        cg::this_cluster().sync();
      } else {
        __syncthreads();
      }
    }
  }
}

}  // namespace qgemm_mx::gemv

// ---- an entry -------------------------------------------------------------------------------------------------------

// Its parameters are in the order of Arguments; what follows `cluster` here is for Config. At most 16 warps, as one block or two:
// 128 registers a thread.
#define QGEMV_ENTRY(name, cluster, ...)                                                                                        \
  extern "C" __global__ void cluster __launch_bounds__(512, 1)                                                                 \
      name(const uint8_t* weight, const void* x, uint32_t tile_bytes, uint32_t walker_stride, uint32_t stride,                 \
           uint32_t ring_offset, int tiles_per_team, int extra_teams, int slices, uint8_t warps, uint8_t depth,                \
           uint8_t walkers, uint8_t early, void* y, long long y_stride, long long x_stride, const void* bias,                  \
           const float* row_scale, int teams, int turn_tiles, int k, int n, int m, int wide) {                                 \
    using namespace qgemm_mx::gemv;                                                                                            \
    run<Config<__VA_ARGS__>>(                                                                                                  \
        {weight, x,        tile_bytes, walker_stride, stride,    ring_offset, tiles_per_team, extra_teams, slices, warps,      \
         depth,  walkers,  early,      y,             y_stride,  x_stride,    bias,           row_scale,   teams,  turn_tiles, \
         k,      n,        m,          wide});                                                                                 \
  }
