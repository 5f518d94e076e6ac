// qgemv_mx: y[M, N] = x[M, K] W[N, K]^T for at most 16 tokens, W in MXFP4, NVFP4 or INT4-g128, x and y in BF16 or FP16. Weights
// go through a ring of packed bytes to registers to mma.m16n8k16: a dequantised weight exists in no memory. The derivation,
// with the bits of a word, is in kernels/README.md.
//
// The weight is the A operand, 16 rows of W. A column of B (n8) is a token and a scale group: it holds the activations of that
// token in that group and zeros in the others, so an accumulator is a sum over one group, and a scale is applied once to it
// instead of to every weight. With 8 tokens or more a column is a token, and an accumulator is drained at the end of a group.
//
// A unit is 16 rows x 256 k, contiguous in memory: four chunks of 64 k (512 bytes, in which a lane's 16 bytes are its fragments of
// four steps of 16 k), then the scales. A team (a block, or a cluster whose blocks share K) owns a run of row tiles; a warp owns
// slices of 256 k and walks the tiles, each unit one bulk copy into the warp's own ring, so that no warp waits for another
// before the sums over warps are taken, once at the end.
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

template <Format format, class Activation, int tokens, int ranks>
struct Config {
  using Act = Activation;
  static constexpr Format kFormat = format;
  static constexpr bool kHalf = sizeof(Activation) == 2 && !__is_same(Activation, __nv_bfloat16);
  static constexpr int kTokens = tokens, kRanks = ranks;
  static constexpr int kGroup = group_of(format), kScaleBytes = scale_bytes_of(format);
  static constexpr bool kE2m1 = format != Format::kInt4;
  static constexpr int kColumnTiles = (tokens + 7) / 8;
  // Groups of a set: an accumulator is drained after each set. INT4 needs no columns for groups: its group is half a slice.
  static constexpr int kSet = kE2m1 && tokens < 8 ? 8 / tokens : 1;
  static constexpr int kSetK = kSet * kGroup, kSets = kSlice / kSetK, kStepsOfSet = kSetK / 16;
  // Four k of a lane in a step are neighbours over a window, so that one load of a token's row serves the window.
  static constexpr int kWindow = kGroup == 16 ? 16 : 32, kStepsOfWindow = kWindow / 16, kWindows = kSlice / kWindow;
  // Two chains of a set: steps one behind the other would wait for each other.
  static constexpr int kChains = kStepsOfSet >= 4 ? 2 : 1;
  static constexpr int kUnitWords = kSlice / kGroup * kScaleBytes / 2;  // 32 bytes each
  static constexpr int kUnitBytes = kChunks * kChunkBytes + kUnitWords * 32;
  static constexpr int kScaleWords = kSet >= 2 || kScaleBytes == 2 ? kSets : kSets / 2;  // words that a lane reads
  // Columns 2t and 2t + 1 of a lane are one token while a token has two columns or more.
  static constexpr int kLaneTokens = kSet >= 2 ? 1 : 2, kTokenLanes = kSet >= 2 ? kSet / 2 : 1;
  // With 16 tokens B takes 64 registers, and a unit is read from the ring chunk by chunk, or registers would spill.
  static constexpr bool kByChunk = tokens > 8, kScalesByWord = kByChunk && kScaleWords > 2;
  static constexpr int kValues = kColumnTiles * 2 * kLaneTokens, kTileSums = kValues * 32;
};

struct Arguments {
  const uint8_t* weight;
  const float* row_scale;  // [N], tensor scale of each row's shard; read by NVFP4 only
  const void* bias;        // [N] in the activations' type, or null
  const void* x;
  void* y;
  int m, n, k;
  long long x_stride, y_stride;     // elements
  int tiles_per_team, extra_teams;  // the first extra_teams teams have one tile more
  int turn_tiles;                   // tiles whose sums have room in shared memory
  int ring_offset;                  // bytes of sums in front of the rings
  int depth;                        // units of a warp in flight
  int wide;                         // scales outside the common range: every slice takes the exact path
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
  } else if constexpr (C::kHalf) {
    constexpr uint32_t kSign = 0x80008000u, kMagnitude = 0x0E000E00u;
    pair[0] = (q & kSign) | ((q << 3) & kMagnitude);
    pair[1] = ((q << 3) & kSign) | ((q << 6) & kMagnitude);
    pair[2] = ((q << 6) & kSign) | ((q << 9) & kMagnitude);
    pair[3] = ((q << 1) & kSign) | ((q >> 1) & 0x06000600u) | ((q >> 2) & 0x08000800u);
  } else {
    constexpr uint32_t kMask = 0x81C081C0u;
    pair[0] = q & kMask;
    pair[1] = (q << 3) & kMask;
    pair[2] = (q << 6) & kMask;
    pair[3] = ((q << 1) & 0x80008000u) | ((q >> 4) & 0x00C000C0u) | ((q >> 5) & 0x01000100u);
  }
}

template <bool kHalf>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// A scale in FP32. On the common path it carries what placed elements and scaled activations lack: 2^62 (BF16) or 2^14 (FP16).
template <class C, bool kExact>
__device__ __forceinline__ float scale_of(uint32_t code) {
  constexpr uint32_t kLack = C::kHalf ? 14 : 62;
  if constexpr (C::kFormat == Format::kInt4) {
    return __uint_as_float(code << 16);
  } else if constexpr (C::kFormat == Format::kMxfp4) {
    if constexpr (!kExact) return __uint_as_float((code << 23) + (kLack << 23));
    return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23);
  } else {
    // E4M3 bits in an FP32 are the scale times 2^-120, subnormals included.
    if constexpr (!kExact) return __uint_as_float(code << 20) * 0x1p120f * (C::kHalf ? 0x1p14f : 0x1p62f);
    if ((code & 0x7F) == 0x7F) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(((code & 0x7F) << 20) | ((code & 0x80) << 24)) * 0x1p120f;
  }
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

template <class C>
struct Unit {
  uint4 chunk[C::kByChunk ? 1 : kChunks];  // four steps each
  uint32_t scale[C::kScalesByWord ? 1 : C::kScaleWords];
};

template <class C>
struct Warp {
  const Arguments& a;
  int lane, g, t;

  __device__ __forceinline__ explicit Warp(const Arguments& a) : a(a) {
    lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  }

  // Word of the unit that holds the scales of this lane's columns in set (or pair of sets) i.
  __device__ __forceinline__ int scale_word(int i) const {
    if constexpr (C::kSet >= 2) return i * (C::kSet / 2) + t % (C::kSet / 2);
    return i;
  }
  __device__ __forceinline__ int chunks_of(int slice) const { return min(kChunks, (a.k + kChunk - 1) / kChunk - slice * kChunks); }

  // From the ring to registers. Chunks beyond K are zeros.
  __device__ __forceinline__ uint4 read_chunk(const uint8_t* slot, int left, int c) const {
    return c < left ? *reinterpret_cast<const uint4*>(slot + c * kChunkBytes + lane * 16) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void read(const uint8_t* slot, int left, Unit<C>& unit) const {
    if constexpr (!C::kByChunk) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) unit.chunk[c] = read_chunk(slot, left, c);
    }
    if constexpr (!C::kScalesByWord) {
#pragma unroll
      for (int i = 0; i < C::kScaleWords; ++i) unit.scale[i] = read_scales(slot, left, i);
    }
  }
  __device__ __forceinline__ uint32_t read_scales(const uint8_t* slot, int left, int i) const {
    const int word = scale_word(i);
    const bool there = word * kChunks < left * C::kUnitWords;
    return there ? *reinterpret_cast<const uint32_t*>(slot + left * kChunkBytes + word * 32 + g * 4) : 0;
  }

  // b0 and b1 of the steps of a window, for one column.
  __device__ __forceinline__ void load_x(int token, int k, uint32_t (&b)[C::kStepsOfWindow][2]) const {
    const bool there = token < a.m && k < a.k;
    const typename C::Act* row = static_cast<const typename C::Act*>(a.x) + token * a.x_stride + k;
    if constexpr (C::kWindow == 32) {
      const uint4 v = there ? __ldg(reinterpret_cast<const uint4*>(row + t * 8)) : make_uint4(0, 0, 0, 0);
      b[0][0] = v.x, b[0][1] = v.y, b[1][0] = v.z, b[1][1] = v.w;
    } else {
      const uint2 v = there ? __ldg(reinterpret_cast<const uint2*>(row + t * 4)) : make_uint2(0, 0);
      b[0][0] = v.x, b[0][1] = v.y;
    }
  }

  // B of a slice. With columns for groups only the lane's own group is loaded, ahead of its slice.
  struct Raw {
    uint32_t x[C::kSet >= 2 ? C::kSets : 1][C::kStepsOfWindow][2];
  };
  struct Held {
    uint32_t b[C::kColumnTiles][C::kWindows][C::kStepsOfWindow][2];
    bool exact;
  };

  __device__ __forceinline__ void load_raw(int slice, Raw& raw) const {
    if constexpr (C::kSet >= 2) {
#pragma unroll
      for (int set = 0; set < C::kSets; ++set)
        load_x(g / C::kSet, slice * kSlice + set * C::kSetK + g % C::kSet * C::kGroup, raw.x[set]);
    }
  }

  __device__ __forceinline__ void hold(int slice, const Raw& raw, Held& held) const {
    uint32_t greatest = 0;
    const auto note = [&](uint32_t pair) {
      if constexpr (C::kE2m1 && !C::kHalf) greatest = __vmaxu2(greatest, pair & 0x7FFF7FFFu);
    };
    if constexpr (C::kSet >= 2) {
#pragma unroll
      for (int set = 0; set < C::kSets; ++set)
#pragma unroll
        for (int s = 0; s < C::kStepsOfWindow; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            note(raw.x[set][s][h]);
#pragma unroll
            for (int group = 0; group < C::kSet; ++group)
              held.b[0][set * C::kSet + group][s][h] = g % C::kSet == group ? raw.x[set][s][h] : 0;
          }
    } else {
#pragma unroll
      for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
#pragma unroll
        for (int w = 0; w < C::kWindows; ++w) {
          load_x(tile8 * 8 + g, slice * kSlice + w * C::kWindow, held.b[tile8][w]);
#pragma unroll
          for (int s = 0; s < C::kStepsOfWindow; ++s) note(held.b[tile8][w][s][0]), note(held.b[tile8][w][s][1]);
        }
    }
    held.exact = C::kE2m1 && a.wide;
    if constexpr (C::kE2m1 && !C::kHalf) {
      // Common: 2^64 times the activations stays inside BF16, and their products with elements times 2^-126 inside FP32.
      const uint32_t one = max(greatest & 0x7FFFu, greatest >> 16);
      const bool large = one >= 0x5E80u, common = one >= 0x3080u, any = one > 0;  // 2^62, 2^-30
      held.exact |= __any_sync(~0u, large) || (!__any_sync(~0u, common) && __any_sync(~0u, any));
      if (!held.exact) {
#pragma unroll
        for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
#pragma unroll
          for (int w = 0; w < C::kWindows; ++w)
#pragma unroll
            for (int s = 0; s < C::kStepsOfWindow; ++s)
#pragma unroll
              for (int h = 0; h < 2; ++h) held.b[tile8][w][s][h] = multiply<false>(held.b[tile8][w][s][h], 0x5F805F80u);
      }
    }
  }

  using Sums = float[C::kColumnTiles][2][C::kLaneTokens];  // [column tile][row half][token of the lane]

  template <bool kExact>
  __device__ __forceinline__ void multiply_unit(const uint8_t* slot, int left, Unit<C>& unit, const Held& held,
                                                Sums& acc) const {
#pragma unroll
    for (int set = 0; set < C::kSets; ++set) {
      float part[C::kChains][C::kColumnTiles][4] = {};
#pragma unroll
      for (int step = 0; step < C::kStepsOfSet; ++step) {
        const int index = set * C::kStepsOfSet + step, window = index / C::kStepsOfWindow, s = index % C::kStepsOfWindow;
        if (C::kByChunk && index % 4 == 0) unit.chunk[0] = read_chunk(slot, left, index / 4);
        const uint4 chunk = unit.chunk[C::kByChunk ? 0 : index / 4];
        const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
        uint32_t pair[4];
        place<C>(words[index % 4], pair);
        if constexpr (kExact && C::kE2m1 && !C::kHalf) {
#pragma unroll
          for (int j = 0; j < 4; ++j) pair[j] = multiply<false>(pair[j], 0x7E807E80u);  // 2^126
        }
#pragma unroll
        for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8)
          mma<C::kHalf>(part[step % C::kChains][tile8], pair, held.b[tile8][window][s][0], held.b[tile8][window][s][1]);
      }
      // Words of a set: two sets share one where its scales have one byte and one group.
      constexpr int kSetsOfWord = C::kSet >= 2 || C::kScaleBytes == 2 ? 1 : 2;
      if (C::kScalesByWord && set % kSetsOfWord == 0) unit.scale[0] = read_scales(slot, left, set / kSetsOfWord);
      const uint32_t scales = unit.scale[C::kScalesByWord ? 0 : set / kSetsOfWord];
#pragma unroll
      for (int tile8 = 0; tile8 < C::kColumnTiles; ++tile8) {
        float sum[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          sum[c] = part[0][tile8][c];
          if constexpr (C::kChains == 2) sum[c] += part[1][tile8][c];
          if constexpr (kExact && C::kHalf && C::kE2m1) sum[c] *= 0x1p14f;
        }
        drain<kExact>(scales, set, sum, acc[tile8]);
      }
    }
  }

  // The sums of a set in columns 2t and 2t + 1, rows g and g + 8, times their scales.
  template <bool kExact>
  __device__ __forceinline__ void drain(uint32_t scales, int set, const float (&sum)[4],
                                        float (&acc)[2][C::kLaneTokens]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t code;
        if constexpr (C::kScaleBytes == 2) {
          code = (scales >> (16 * half)) & 0xFFFF;
        } else if constexpr (C::kSet >= 2) {
          code = (scales >> (16 * half + 8 * c)) & 0xFF;
        } else {
          code = (scales >> (16 * half + 8 * (set % 2))) & 0xFF;
        }
        const int token = C::kLaneTokens == 1 ? 0 : c;
        acc[half][token] = fmaf(scale_of<C, kExact>(code), sum[2 * half + c], acc[half][token]);
      }
  }
};

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void run(const Arguments& a) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(128) uint8_t shared[];
  const int rank = blockIdx.x % C::kRanks, team = blockIdx.x / C::kRanks, index = threadIdx.x / 32;
  const int warps = blockDim.x / 32, step = C::kRanks * warps;
  const int begin = team * a.tiles_per_team + min(team, a.extra_teams);
  const int end = begin + a.tiles_per_team + (team < a.extra_teams);
  const int chunks = (a.k + kChunk - 1) / kChunk, slices = (chunks + kChunks - 1) / kChunks;
  const int first_slice = rank * warps + index;
  const long long tile_bytes = static_cast<long long>(chunks) * (C::kUnitBytes / kChunks);
  const Warp<C> warp(a);
  const bool works = first_slice < slices;

  // The ring of this warp. Its units come in the order in which the warp takes them: tiles of a turn fastest, so that the
  // activations of a slice serve all tiles; then slices; then turns.
  uint8_t* slots = shared + a.ring_offset + index * a.depth * C::kUnitBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + a.ring_offset + warps * a.depth * C::kUnitBytes) + index * a.depth;
  const auto width = [&](int base) { return min(a.turn_tiles, end - base); };
  const auto unit_at = [&](int tile, int slice) {
    return a.weight + tile * tile_bytes + static_cast<long long>(slice) * C::kUnitBytes;
  };
  struct Ahead {
    int base, tile, slice;
    const uint8_t* source;
  } ahead{begin, 0, first_slice, unit_at(begin, first_slice)};
  // Requests the unit ahead into a slot, and steps on.
  const auto request = [&](int slot) {
    if (ahead.base >= end) return;
    if (warp.lane == 0) {
      const uint32_t bytes = warp.chunks_of(ahead.slice) * (C::kUnitBytes / kChunks);
      ptx::mbarrier_arrive_expect(full + slot, bytes);
      ptx::bulk_load(slots + slot * C::kUnitBytes, ahead.source, bytes, full + slot);
    }
    ahead.source += tile_bytes;
    if (++ahead.tile < width(ahead.base)) return;
    if ((ahead.slice += step) >= slices) ahead.slice = first_slice, ahead.base += a.turn_tiles;
    ahead.tile = 0, ahead.source = unit_at(ahead.base, ahead.slice);
  };

  // Weights do not depend on the kernel before: they are requested before anything else, and before it is waited for.
  if (warp.lane == 0) {
    for (int d = 0; d < a.depth; ++d) ptx::mbarrier_init(full + d, 1);
    ptx::fence_mbarrier_init();
  }
  typename Warp<C>::Raw raw;
  typename Warp<C>::Held held;
  if (works) {
#pragma unroll 1
    for (int d = 0; d < a.depth; ++d) request(d);
  }
  __syncwarp();
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (works) warp.load_raw(first_slice, raw);

  float* sums = reinterpret_cast<float*>(shared);  // [warp][tile of the turn][value][lane]
  const int warp_sums = a.turn_tiles * C::kTileSums;
  float* teamed = sums + warps * warp_sums;  // [value of the turn], in the first block of a cluster
  int slot = 0;
  uint32_t phase = 0;
  // One copy of the loop body in the code, and the exact path in a loop of its own: what an unrolled body would cost in
  // instruction fetches is more than it saves.
  const auto walk = [&](auto exact, int count, int left, bool first) {
    float* mine = sums + index * warp_sums + warp.lane;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
      Unit<C> unit;
      ptx::mbarrier_wait(full + slot, phase);
      const uint8_t* source = slots + slot * C::kUnitBytes;
      warp.read(source, left, unit);
      // Every lane has read the slot before the next unit may land in it.
      const auto release = [&] {
        __syncwarp();
        request(slot);
        if (++slot == a.depth) slot = 0, phase ^= 1;
      };
      if constexpr (!C::kByChunk) release();
      typename Warp<C>::Sums acc = {};
      warp.template multiply_unit<decltype(exact)::value>(source, left, unit, held, acc);
      if constexpr (C::kByChunk) release();
#pragma unroll
      for (int v = 0; v < C::kValues; ++v) {
        const float value = acc[v / (2 * C::kLaneTokens)][v / C::kLaneTokens % 2][v % C::kLaneTokens];
        mine[v * 32] = first ? value : mine[v * 32] + value;
      }
      mine += C::kTileSums;
    }
  };
  const bool one_slice = first_slice + step >= slices;  // then what is held serves every turn
  for (int base = begin; base < end; base += a.turn_tiles) {
    const int count = width(base);
#pragma unroll 1
    for (int slice = first_slice; slice < slices; slice += step) {
      if (!one_slice || base == begin) warp.hold(slice, raw, held);
      if (!one_slice) warp.load_raw(slice + step < slices ? slice + step : first_slice, raw);
      const int left = warp.chunks_of(slice);
      if (C::kE2m1 && held.exact) {
        walk(Constant<true>{}, count, left, slice == first_slice);
      } else {
        walk(Constant<false>{}, count, left, slice == first_slice);
      }
    }
    // Over the warps in their order; then over the lanes of a token; then over the blocks of a cluster.
    __syncthreads();
    const int active = min(warps, slices - rank * warps), values = count * C::kTileSums;
    const auto total = [&](int e) {
      float sum = 0.0f;
#pragma unroll 4
      for (int w = 0; w < active; ++w) sum += sums[w * warp_sums + e];
#pragma unroll
      for (int other = 1; other < C::kTokenLanes; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      return sum;
    };
    if constexpr (C::kRanks > 1) {
      cg::cluster_group cluster = cg::this_cluster();
      if (rank > 0)
        for (int e = threadIdx.x; e < values; e += 32 * warps)
          cluster.map_shared_rank(teamed, 0)[(rank - 1) * warp_sums + e] = total(e);
      cluster.sync();
    }
    if (rank == 0) {
      for (int e = threadIdx.x; e < values; e += 32 * warps) {
        float sum = total(e);
#pragma unroll
        for (int other = 1; other < C::kRanks; ++other) sum += teamed[(other - 1) * warp_sums + e];
        const int v = e / 32 % C::kValues, half = v / C::kLaneTokens % 2;
        const int row = (base + e / C::kTileSums) * kRows + half * 8 + warp.g;
        const int token = C::kLaneTokens == 1 ? warp.t / C::kTokenLanes
                                              : v / (2 * C::kLaneTokens) * 8 + 2 * warp.t + v % C::kLaneTokens;
        if (token >= a.m || row >= a.n || warp.t % C::kTokenLanes != 0) continue;
        if constexpr (C::kFormat == Format::kNvfp4) sum *= a.row_scale[row];
        using Act = typename C::Act;
        if (a.bias) sum += static_cast<float>(static_cast<const Act*>(a.bias)[row]);
        static_cast<Act*>(a.y)[token * a.y_stride + row] = Act(sum);
      }
    }
    if (base + a.turn_tiles < end) {  // the sums are read before the next turn writes them
      if constexpr (C::kRanks > 1) {
        cg::this_cluster().sync();
      } else {
        __syncthreads();
      }
    }
  }
}

}  // namespace qgemm_mx::gemv

// At most 16 warps, as one block or two: 128 registers a thread.
#define ENTRY(name, format, act, type, tokens, ranks, cluster)                                                         \
  extern "C" __global__ void cluster __launch_bounds__(512, 1)                                                         \
      qgemv_mx_##name##_##act##_t##tokens##_c##ranks(const uint8_t* weight, const float* row_scale, const void* bias,  \
                                                     const void* x, void* y, int m, int n, int k, long long x_stride,  \
                                                     long long y_stride, int tiles_per_team, int extra_teams,          \
                                                     int turn_tiles, int ring_offset, int depth, int wide) {           \
    const qgemm_mx::gemv::Arguments a{weight,      row_scale,  bias,        x,     y,   m, n, k, x_stride, y_stride,   \
                                      tiles_per_team, extra_teams, turn_tiles, ring_offset, depth, wide};              \
    qgemm_mx::gemv::run<qgemm_mx::gemv::Config<qgemm_mx::gemv::Format::format, type, tokens, ranks>>(a);               \
  }
#define RANKS(name, format, act, type, tokens)       \
  ENTRY(name, format, act, type, tokens, 1, )        \
  ENTRY(name, format, act, type, tokens, 2, __cluster_dims__(2, 1, 1))
#define TOKENS(name, format, act, type) \
  RANKS(name, format, act, type, 1)     \
  RANKS(name, format, act, type, 2)     \
  RANKS(name, format, act, type, 4)     \
  RANKS(name, format, act, type, 8)     \
  RANKS(name, format, act, type, 16)
#define ACTIVATIONS(name, format)            \
  TOKENS(name, format, bf16, __nv_bfloat16)  \
  TOKENS(name, format, fp16, __half)
ACTIVATIONS(mxfp4, kMxfp4)
ACTIVATIONS(nvfp4, kNvfp4)
ACTIVATIONS(int4_g128, kInt4)
