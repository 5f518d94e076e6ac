// The matrix kernel: y[M, N] = x[M, K] W[N, K]^T from some 16 tokens to prefill, W in MXFP4, NVFP4 or INT4-g128, x and y in BF16.
// The weight is the A operand of wgmma, dequantised in registers; a dequantised weight exists in no memory. The derivation is in
// kernels/README.md; the packed layout, which the decode kernel shares, in qgemm_mx/gemv_layout.py.
//
// A block computes kRows rows of W by kTokens tokens. One warp requests weights (bulk copies of packed units, 16 rows x 256 k),
// one requests activations (tensor maps, boxes of 64 k); warpgroups of consumers take a unit's words as whole 16-byte loads, which
// are their fragments, place the bits, multiply by scales, and issue wgmma. While one product runs, the next fragments are made.
//
// K is shared by the blocks of a cluster (split), and then perhaps by the warpgroups of a block (kWays take chunks in turn); the sums
// of all parts are added in the order of the parts, through distributed shared memory. Blocks of a cluster that share activations own neighbouring
// rows, and multicast the activations to one another.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

#include "ptx_memory.cuh"
#include "ptx_wgmma.cuh"

namespace qgemm_mx::gemm {

enum class Format { kMxfp4, kNvfp4, kInt4 };

constexpr int kUnitRows = 16, kSlice = 256, kChunk = 64, kChunks = kSlice / kChunk, kChunkBytes = kUnitRows * kChunk / 2;
constexpr int kSteps = kChunk / 16;                // k16 steps of a chunk
constexpr int kWarps = 4, kThreads = 32 * kWarps;  // of a warpgroup

// row_tiles: of 64 rows, of a warpgroup. ways: warpgroups that share K. overlap: off for the ablation alone, then every product is
// waited for before the next fragments are made.
template <Format format, int tokens, int row_tiles, int consumers, int ways, bool overlap = true>
struct Config {
  static constexpr Format kFormat = format;
  static constexpr int kTokens = tokens, kRowTiles = row_tiles, kConsumers = consumers, kWays = ways;
  static constexpr int kRowGroups = consumers / ways, kRows = 64 * row_tiles * kRowGroups, kUnits = kRows / kUnitRows;
  static constexpr int kGroup = format == Format::kMxfp4 ? 32 : format == Format::kNvfp4 ? 16 : 128;
  static constexpr int kUnitScaleBytes = kUnitRows * kSlice / kGroup * (format == Format::kInt4 ? 2 : 1);
  static constexpr int kUnitBytes = kUnitScaleBytes + kChunks * kChunkBytes;
  static constexpr int kWeightStageBytes = kUnits * kUnitBytes;
  // Chunks of a stage of activations: few tokens make a stage small, and a wait a stage would cost more than it guards.
  static constexpr int kXChunks = tokens <= 64 ? kChunks : 1;
  static constexpr int kXChunkBytes = tokens * kChunk * 2, kXStageBytes = kXChunks * kXChunkBytes;
  static constexpr int kBlock = kThreads * (consumers + 1);
  // Registers of a thread: a partition of the SM has 16384 for its warps, consumers + 1 of them.
  static constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
  static constexpr int kSums = tokens / 2, kOctets = tokens / 8 * row_tiles;  // FP32 sums of a thread in a row tile; in fours: octets
  static constexpr bool kPromote = format == Format::kInt4;                   // scales multiply sums, of 128 k
  static constexpr int kBatches = kChunks / ways * row_tiles;                 // of a warpgroup in a slice; a batch is four wgmma
  static constexpr int kBuffers = kBatches > 1 && !kPromote && overlap ? 2 : 1;  // of fragments
  static_assert(consumers == 2 && consumers % ways == 0 && kChunks % ways == 0 && (ways == 1 || (kXChunks == kChunks && !kPromote)));
};

// What a launch is told. A job is a row tile (of all blocks that share) by a token tile. Clusters take the first whole_jobs in turn, and
// share the slices of the rest evenly, so that no wave is left half empty: see Walk. Parameters come through a cache that starts empty, in
// lines of 64 bytes: what the first loads need stands first.
struct Arguments {
  const uint8_t* weight;
  uint32_t tile_bytes;  // of 16 rows of the weight
  int n, k, row_jobs, token_jobs;
  int group;  // token tiles that are walked together, for the L2
  uint8_t share, split, x_stages, w_stages;
  uint32_t sums_offset;  // bytes into shared memory of the sums that other parts send; 0: over the stages
  int whole_jobs;        // all where K is split
  uint32_t scale_offset;  // MXFP4: makes BF16 exponents of stored codes
  float factor;           // of every sum: the power of two that operands lack
  uint32_t split_inverse;  // 2^32 / split, rounded up: a division of small numbers by it
  __nv_bfloat16* y;
  long long y_stride;         // elements
  const __nv_bfloat16* bias;  // [N] or null
  const float* row_scale;     // [N], tensor scale of each row's shard; read by NVFP4 only
  float4* partial;      // [blocks][octets][threads of consumers]: sums of blocks that end jobs which others begin
  uint32_t* arrived;    // [blocks][warps of consumers], zeros between launches
  int m;
  uint32_t slices_inverse, clusters_inverse;  // 2^32 over slices of a job and over clusters, rounded up
  uint32_t reserved[3];
  CUtensorMap x;  // box: 64 k x kTokens / share rows, swizzle of 128 bytes
};

// Barriers and stages of the dynamic shared memory, which begins at a multiple of 1024.
template <class C>
struct Shared {
  uint8_t *x, *w;
  uint64_t *full_x, *empty_x, *full_w, *empty_w, *summed;

  __device__ __forceinline__ Shared(uint8_t* base, int x_stages, int w_stages) {
    x = base;
    w = x + x_stages * C::kXStageBytes;
    full_w = reinterpret_cast<uint64_t*>(w + w_stages * C::kWeightStageBytes);
    empty_w = full_w + w_stages;
    full_x = empty_w + w_stages;
    empty_x = full_x + x_stages;
    summed = empty_x + x_stages;
  }
};

struct Ring {
  int stages, slot = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
};

// ---- what a block does --------------------------------------------------------------------------------------------------------

struct Job {
  int row, token;  // tiles
};
// Tokens within a group fastest, then rows, then groups: a wave reads few weights and few activations.
__device__ __forceinline__ Job job_at(const Arguments& a, int index) {
  if (a.token_jobs == 1) return {index, 0};
  const int whole = a.group * a.row_jobs, group = index / whole, rest = index % whole;
  const int width = min(a.group, a.token_jobs - group * a.group);
  return {rest / width, group * a.group + rest % width};
}

// Chunks [first, last) of K of a block. Where warpgroups share K they are whole slices: beyond K activations come as zeros, and the
// words and scales that stand in a stage are finite whatever they are.
struct Range {
  int first, last, chunks;  // chunks: of K
  __device__ __forceinline__ Range(const Arguments& a, int part, int grain) {
    chunks = (a.k + kChunk - 1) / kChunk;
    const int grains = (chunks + grain - 1) / grain;
    first = 0, last = grains * grain;
    if (a.split > 1) {
      first = __umulhi(grains * part, a.split_inverse) * grain;
      last = __umulhi(grains * (part + 1), a.split_inverse) * grain;
    }
  }
};

struct Place {
  int in_share, part;  // part: of K
  int cluster, clusters;
  __device__ __forceinline__ explicit Place(const Arguments& a) {
    const int doublings = 31 - __clz(a.share);  // share is a power of two
    const auto clusters_in = [&](int blocks) {
      return a.split == 1 ? blocks >> doublings : static_cast<int>(__umulhi(blocks >> doublings, a.split_inverse));
    };
    cluster = clusters_in(blockIdx.x), clusters = clusters_in(gridDim.x);
    const int rank = blockIdx.x - cluster * a.share * a.split;
    in_share = rank & (a.share - 1), part = rank >> doublings;
  }
};

// A cluster's part of the jobs, one after the other. Of the streamed ones, whose slices stand in one line, it has a run. A job that
// two runs share is begun by one cluster, as the last thing that it does, and ended by another, as the first: so the sums of the end
// are there when the beginning is done. The later run belongs to the cluster with the lower index, which the hardware starts first:
// nobody waits for a cluster that may not have begun.
struct Piece {
  int job;            // streamed jobs are counted from whole_jobs on
  int first, last;    // chunks
  bool begins, ends;  // the job
};
struct Walk {
  int index, at, end;  // at, end: slices of the streamed jobs
  static __device__ __forceinline__ int slices(const Arguments& a) { return (a.k + kSlice - 1) / kSlice; }  // of a job
  static __device__ __forceinline__ int job_of(const Arguments& a, int slice) { return __umulhi(slice, a.slices_inverse); }
  static __device__ __forceinline__ int begin_of(const Arguments& a, int run) {
    return __umulhi((a.row_jobs * a.token_jobs - a.whole_jobs) * slices(a) * run, a.clusters_inverse);
  }
  __device__ __forceinline__ Walk(const Arguments& a, const Place& place) {
    index = place.cluster, at = end = 0;
    if (a.whole_jobs < a.row_jobs * a.token_jobs) {
      const int run = place.clusters - 1 - place.cluster;
      at = begin_of(a, run), end = begin_of(a, run + 1);
    }
  }
  // Constraint: one way through, and divisions by inverses that the host has made. Otherwise the compiler takes the loop over pieces
  // for one in which lanes part, and moves the descriptors of wgmma to uniform registers one by one: a tenth of the main loop.
  __device__ __forceinline__ bool next(const Arguments& a, const Place& place, const Range& range, Piece& piece) {
    const bool whole = index < a.whole_jobs;
    if (!whole && at >= end) return false;
    const int per = slices(a), job = job_of(a, at), from = at - job * per, to = min(per, from + end - at);
    piece.job = whole ? index : a.whole_jobs + job;
    piece.first = whole ? range.first : from * kChunks, piece.last = whole ? range.last : min(to * kChunks, range.chunks);
    piece.begins = whole || from == 0, piece.ends = whole || to == per;
    index += whole ? place.clusters : 0, at += whole ? 0 : to - from;
    return true;
  }
  __device__ __forceinline__ bool last(const Arguments& a) const { return index >= a.whole_jobs && at >= end; }
  // Runs after this cluster's that end the job which it begins: the clusters with the next lower indices.
  __device__ __forceinline__ int later(const Arguments& a, const Place& place) const {
    const int job_end = (job_of(a, end) + 1) * slices(a), run = place.clusters - 1 - place.cluster;  // the job goes on behind `end`
    int count = 0;
    for (int covered = end; covered < job_end; covered = begin_of(a, run + count + 1)) ++count;
    return count;
  }
};

// ---- producers ----------------------------------------------------------------------------------------------------------------

// One slice after the other; a lane requests the unit of its 16 rows.
template <class C>
__device__ __forceinline__ void request_weights(const Arguments& a, const Shared<C>& shared, const Place& place, const Piece& piece,
                                                int chunks, Job job, Ring& ring) {
  const int lane = threadIdx.x % 32, first_unit = (job.row * a.share + place.in_share) * C::kUnits;
  const int units = max(0, min(C::kUnits, (a.n + kUnitRows - 1) / kUnitRows - first_unit));
  const uint8_t* own = a.weight + static_cast<size_t>(first_unit + lane) * a.tile_bytes;
#pragma unroll 1
  for (int chunk = piece.first; chunk < piece.last;) {
    const int from = chunk % kChunks, to = min(kChunks, from + min(piece.last, chunks) - chunk);
    const uint32_t value_bytes = (to - from) * kChunkBytes;
    uint64_t* full = shared.full_w + ring.slot;
    ptx::mbarrier_wait(shared.empty_w + ring.slot, ring.phase ^ 1);
    if (lane == 0) ptx::mbarrier_arrive_expect(full, units * (C::kUnitScaleBytes + value_bytes));
    __syncwarp();
    if (lane < units) {
      const uint8_t* source = own + chunk / kChunks * C::kUnitBytes;
      uint8_t* slot = shared.w + ring.slot * C::kWeightStageBytes + lane * C::kUnitBytes;
      if (from == 0) {
        ptx::bulk_load(slot, source, C::kUnitScaleBytes + value_bytes, full);
      } else {
        const int at = C::kUnitScaleBytes + from * kChunkBytes;
        ptx::bulk_load(slot, source, C::kUnitScaleBytes, full);
        ptx::bulk_load(slot + at, source + at, value_bytes, full);
      }
    }
    ring.next();
    chunk += kChunks - from;
  }
}

template <class C>
__device__ __forceinline__ void request_x(const Arguments& a, const Shared<C>& shared, const Place& place, const Piece& piece, Job job,
                                          Ring& ring) {
  if (threadIdx.x % 32 != 0) return;
  const int rows = C::kTokens / a.share, m = job.token * C::kTokens + place.in_share * rows;
  const uint16_t blocks = ((1u << a.share) - 1) << (place.part * a.share);
#pragma unroll 1
  for (int chunk = piece.first; chunk < piece.last;) {
    const int from = chunk % C::kXChunks, to = min(C::kXChunks, from + piece.last - chunk);
    uint64_t* full = shared.full_x + ring.slot;
    ptx::mbarrier_wait(shared.empty_x + ring.slot, ring.phase ^ 1);
    ptx::mbarrier_arrive_expect(full, (to - from) * C::kXChunkBytes);
    uint8_t* slot = shared.x + ring.slot * C::kXStageBytes + place.in_share * rows * kChunk * 2;
    for (int c = from; c < to; ++c, ++chunk) {
      if (a.share == 1) {
        ptx::tensor_load(slot + c * C::kXChunkBytes, &a.x, chunk * kChunk, m, full);
      } else {
        ptx::tensor_load_multicast(slot + c * C::kXChunkBytes, &a.x, chunk * kChunk, m, full, blocks);
      }
    }
    ring.next();
  }
}

// ---- fragments ----------------------------------------------------------------------------------------------------------------

// The four pairs of a word, see the decode kernel: E2M1 elements times 2^-126 as BF16; INT4 codes as they are.
template <class C>
__device__ __forceinline__ void place_bits(uint32_t q, uint32_t (&pair)[4]) {
  if constexpr (C::kFormat == Format::kInt4) {
    constexpr uint32_t kBias = 0x43084308u;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t biased = ((q >> (4 * j)) & 0x000F000Fu) ^ kBias;
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pair[j]) : "r"(biased), "r"(kBias));
    }
  } else {
    constexpr uint32_t kMask = 0x81C081C0u;
    const uint32_t r = __funnelshift_l(q, q, 10);
    pair[0] = q & kMask;
    pair[1] = (q << 4) & kMask;
    pair[2] = (r ^ (q << 6)) & kMask;
    pair[3] = (r ^ (r << 2)) & kMask;
  }
}

// A pair times one half of `factors`: 0 the low, 1 the high.
template <int half>
__device__ __forceinline__ uint32_t multiply(uint32_t pair, uint32_t factors) {
  const uint32_t both = __byte_perm(factors, 0, half ? 0x3232 : 0x1010);
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(both));
  return d;
}

// What a lane needs of a chunk of its unit: a word a step, and scales of its two rows.
template <class C>
struct Packed {
  uint4 q;
  uint32_t scale[C::kFormat == Format::kNvfp4 ? 2 : 1];

  __device__ __forceinline__ void read(const uint8_t* unit, int chunk, int lane) {
    q = *reinterpret_cast<const uint4*>(unit + C::kUnitScaleBytes + chunk * kChunkBytes + lane * 16);
    const int g = lane / 4;
    if constexpr (C::kFormat == Format::kMxfp4) {
      scale[0] = *reinterpret_cast<const uint32_t*>(unit + g * 16 + chunk * 4);
    } else if constexpr (C::kFormat == Format::kNvfp4) {
      const uint2 v = *reinterpret_cast<const uint2*>(unit + g * 32 + chunk * 8);
      scale[0] = v.x, scale[1] = v.y;
    } else {
      scale[0] = *reinterpret_cast<const uint32_t*>(unit + g * 8 + chunk / 2 * 4);
    }
  }

  // Factors of a step, row g in the low half, row g + 8 in the high. MXFP4: the exponent of scale x 2^(126 - shift), for two
  // steps. NVFP4: the E5M3 bits of scale x 2^119.
  __device__ __forceinline__ uint32_t factors(int step, uint32_t offset) const {
    const int group = C::kFormat == Format::kMxfp4 ? step / 2 : step % 2;
    const uint32_t word = scale[C::kFormat == Format::kNvfp4 ? step / 2 : 0];
    const uint32_t codes = group == 0 ? word & 0x00FF00FFu : __byte_perm(word, 0, 0x4341);
    return C::kFormat == Format::kMxfp4 ? codes * 0x80u + offset : codes * 0x10u + 0x70007000u;
  }

  __device__ __forceinline__ void dequantise(uint32_t offset, uint32_t (&fragment)[kSteps][4]) const {
    const uint32_t words[kSteps] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      place_bits<C>(words[s], fragment[s]);
      if constexpr (!C::kPromote) {
        const uint32_t f = factors(s, offset);
        fragment[s][0] = multiply<0>(fragment[s][0], f), fragment[s][2] = multiply<0>(fragment[s][2], f);
        fragment[s][1] = multiply<1>(fragment[s][1], f), fragment[s][3] = multiply<1>(fragment[s][3], f);
      }
    }
  }
};

// ---- consumers ----------------------------------------------------------------------------------------------------------------

template <class C>
struct Consumer {
  const Arguments& a;
  const Shared<C>& shared;
  const Place& place;
  int row_group, way, warp, lane, g, t;
  float sums[C::kRowTiles][C::kSums];
  float part[C::kPromote ? C::kSums : 1];  // of one scale group

  __device__ __forceinline__ Consumer(const Arguments& a, const Shared<C>& shared, const Place& place) : a(a), shared(shared), place(place) {
    const int group = __shfl_sync(~0u, threadIdx.x / kThreads, 0);
    row_group = group % C::kRowGroups, way = group / C::kRowGroups;
    warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  }

  // ---- the main loop

  __device__ __forceinline__ const uint8_t* unit_of(int slot, int row_tile) const {
    return shared.w + slot * C::kWeightStageBytes + ((row_group * C::kRowTiles + row_tile) * kWarps + warp) * C::kUnitBytes;
  }
  __device__ __forceinline__ void release_x(int slot) const {
    if (a.share == 1) {
      if (lane == 0) ptx::mbarrier_arrive(shared.empty_x + slot);
    } else if (lane < a.share) {
      ptx::mbarrier_arrive_in(shared.empty_x + slot, place.part * a.share + lane);
    }
  }
  // All words of the slot are in registers. The copy engine may not overtake loads of another proxy: hence the fence.
  __device__ __forceinline__ void release_w(Ring& ring) const {
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared.empty_w + ring.slot);
    ring.next();
  }
  __device__ __forceinline__ void issue(float (&d)[C::kSums], const uint32_t (&fragment)[kSteps][4], uint32_t x, int add) {
    const uint64_t b = ptx::descriptor_b(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) ptx::Wgmma<C::kTokens, false>::run(d, fragment[s], b + 2 * s, s == 0 ? add : 1);
    ptx::wgmma_commit();
  }
  // Adds the sums of a scale group, times the scales of this lane's two rows.
  __device__ __forceinline__ void promote(uint32_t scales, int add) {
    const float upper = __uint_as_float(scales << 16), lower = __uint_as_float(scales & 0xFFFF0000u);
#pragma unroll
    for (int i = 0; i < C::kSums; ++i) {
      const float scale = i % 4 < 2 ? upper : lower;
      sums[0][i] = add ? fmaf(part[i], scale, sums[0][i]) : part[i] * scale;
    }
  }

  // The products of a piece of K: whole slices with fragments in two buffers, one made while the other is multiplied; what is less
  // than a slice, at the ends of a piece, one chunk after the other.
  __device__ __forceinline__ void multiply_piece(const Piece& piece, Ring& x_ring, Ring& w_ring) {
    int chunk = piece.first, add = 0;
    if constexpr (C::kWays > 1) {  // a warpgroup may find no chunk of its own
#pragma unroll
      for (int i = 0; i < C::kSums; ++i) sums[0][i] = 0.0f;
      add = 1;
    }
    if (C::kWays == 1 && chunk % kChunks) {
      const int last = min(piece.last, chunk / kChunks * kChunks + kChunks);
      multiply_part(chunk, last, add, x_ring, w_ring);
      chunk = last;
    }
    int previous = -1;  // stage of activations whose products may still be under way
#pragma unroll 1
    for (; chunk + kChunks <= piece.last; chunk += kChunks) multiply_slice(add, previous, x_ring, w_ring);
    ptx::wgmma_wait<0>();
    if (C::kBuffers == 2 && previous >= 0) release_x(previous);
    if (C::kWays == 1 && chunk < piece.last) multiply_part(chunk, piece.last, add, x_ring, w_ring);
  }

  __device__ __forceinline__ void multiply_slice(int& add, int& previous, Ring& x_ring, Ring& w_ring) {
    uint32_t fragment[C::kBuffers][kSteps][4];
    Packed<C> packed[2];
    const auto chunk_of = [&](int batch) { return batch / C::kRowTiles * C::kWays + (C::kWays > 1 ? way : 0); };
    ptx::mbarrier_wait(shared.full_w + w_ring.slot, w_ring.phase);
    const uint8_t* units[C::kRowTiles];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) units[r] = unit_of(w_ring.slot, r);
    constexpr bool kAhead = C::kTokens * C::kRowTiles < 256;  // words of the next batch are read ahead where registers are not short
    if (kAhead) packed[0].read(units[0], chunk_of(0), lane);
#pragma unroll
    for (int batch = 0; batch < C::kBatches; ++batch) {
      const int r = batch % C::kRowTiles, c = batch / C::kRowTiles, buffer = batch % C::kBuffers;  // c: of this warpgroup's chunks
      if (!kAhead) packed[batch % 2].read(units[r], chunk_of(batch), lane);
      if (kAhead && batch + 1 < C::kBatches) packed[(batch + 1) % 2].read(units[(batch + 1) % C::kRowTiles], chunk_of(batch + 1), lane);
      packed[batch % 2].dequantise(a.scale_offset, fragment[buffer]);
      if (batch == C::kBatches - 1) release_w(w_ring);
      const bool first_of_stage = r == 0 && (C::kXChunks == 1 || c == 0);
      if (first_of_stage) ptx::mbarrier_wait(shared.full_x + x_ring.slot, x_ring.phase);
      const uint32_t x =
          ptx::smem_address(shared.x) + x_ring.slot * C::kXStageBytes + (C::kXChunks == 1 ? 0 : chunk_of(batch)) * C::kXChunkBytes;
      if constexpr (C::kPromote) {
        issue(part, fragment[buffer], x, c % 2);
        ptx::wgmma_wait<0>();
        if (c % 2) promote(packed[batch % 2].scale[0], c > 1 ? 1 : add);
      } else {
        issue(sums[r], fragment[buffer], x, c == 0 ? add : 1);
        ptx::wgmma_wait<C::kBuffers - 1>();
        if (C::kBuffers == 2 && first_of_stage && previous >= 0) release_x(previous);
      }
      if (r == C::kRowTiles - 1 && (C::kXChunks == 1 || batch == C::kBatches - 1)) {
        previous = x_ring.slot;
        if constexpr (C::kBuffers == 1) release_x(previous);
        x_ring.next();
      }
    }
    add = 1;
  }

  __device__ __forceinline__ void multiply_part(int chunk, int last, int& add, Ring& x_ring, Ring& w_ring) {
    ptx::mbarrier_wait(shared.full_w + w_ring.slot, w_ring.phase);
    bool begun = false;
#pragma unroll 1
    for (; chunk < last; ++chunk) {
      const int in_stage = chunk % C::kXChunks;
      if (!begun) ptx::mbarrier_wait(shared.full_x + x_ring.slot, x_ring.phase);
      begun = true;
      const uint32_t x = ptx::smem_address(shared.x) + x_ring.slot * C::kXStageBytes + in_stage * C::kXChunkBytes;
#pragma unroll
      for (int r = 0; r < C::kRowTiles; ++r) {
        uint32_t fragment[kSteps][4];
        Packed<C> packed;
        packed.read(unit_of(w_ring.slot, r), chunk % kChunks, lane);
        packed.dequantise(a.scale_offset, fragment);
        if constexpr (C::kPromote) {
          issue(part, fragment, x, 0);
          ptx::wgmma_wait<0>();
          promote(packed.scale[0], add);
        } else {
          issue(sums[r], fragment, x, add);
          ptx::wgmma_wait<0>();
        }
      }
      add = 1;
      if (in_stage == C::kXChunks - 1 || chunk == last - 1) {
        release_x(x_ring.slot);
        x_ring.next();
        begun = false;
      }
    }
    release_w(w_ring);
  }

  // ---- the end of a job. An octet is eight tokens of a row tile: four sums of a thread, [row half][token of a pair].

  struct Finish {
    float factor[2], bias[2];
  };
  __device__ __forceinline__ int first_row(Job job, int r) const {
    return (job.row * a.share + place.in_share) * C::kRows + (row_group * C::kRowTiles + r) * 64 + warp * 16;
  }
  __device__ __forceinline__ Finish finish_of(Job job, int r) const {
    Finish finish;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row(job, r) + 8 * half + g;
      const bool there = row < a.n;
      finish.factor[half] = a.factor;
      if constexpr (C::kFormat == Format::kNvfp4) finish.factor[half] *= there ? a.row_scale[row] : 0.0f;
      finish.bias[half] = a.bias && there ? __bfloat162float(a.bias[row]) : 0.0f;
    }
    return finish;
  }
  // Rounds once and stores: rows 2t and 2t + 1 of both halves, of token g of the octet.
  __device__ __forceinline__ void store(Job job, int r, int o, float4 v, const Finish& f) const {
    const auto pair = [](float low, float high) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const uint32_t&>(both);
    };
    const uint32_t bits[2] = {ptx::transpose_8x8(pair(fmaf(v.x, f.factor[0], f.bias[0]), fmaf(v.y, f.factor[0], f.bias[0]))),
                              ptx::transpose_8x8(pair(fmaf(v.z, f.factor[1], f.bias[1]), fmaf(v.w, f.factor[1], f.bias[1])))};
    const int token = job.token * C::kTokens + o * 8 + g, row = first_row(job, r) + 2 * t;
    if (token >= a.m) return;
    __nv_bfloat16* to = a.y + token * a.y_stride + row;
    const bool whole = (reinterpret_cast<uintptr_t>(to) & 3) == 0;  // y may begin anywhere
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (whole && row + 8 * half + 1 < a.n) {
        *reinterpret_cast<uint32_t*>(to + 8 * half) = bits[half];
      } else {
        if (row + 8 * half < a.n) reinterpret_cast<uint16_t*>(to)[8 * half] = bits[half] & 0xFFFF;
        if (row + 8 * half + 1 < a.n) reinterpret_cast<uint16_t*>(to)[8 * half + 1] = bits[half] >> 16;
      }
    }
  }
  __device__ __forceinline__ float4 octet(int i) const {
    const float* own = sums[i / (C::kTokens / 8)] + i % (C::kTokens / 8) * 4;
    return make_float4(own[0], own[1], own[2], own[3]);
  }
  __device__ __forceinline__ void finish(Job job) {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const Finish f = finish_of(job, r);
#pragma unroll
      for (int o = 0; o < C::kTokens / 8; ++o) store(job, r, o, octet(r * (C::kTokens / 8) + o), f);
    }
  }

  // Sums of a piece that another block's piece begins: to memory, each warp for the same warp there.
  __device__ __forceinline__ float4* partial_of(int block) const {
    return a.partial + static_cast<size_t>(block) * C::kOctets * (kThreads * C::kConsumers) + threadIdx.x;
  }
  __device__ __forceinline__ void leave_partial() const {
    float4* to = partial_of(blockIdx.x);
#pragma unroll
    for (int i = 0; i < C::kOctets; ++i) __stcg(to + i * (kThreads * C::kConsumers), octet(i));
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::store_release(a.arrived + blockIdx.x * (kWarps * C::kConsumers) + threadIdx.x / 32, 1);
  }
  __device__ __forceinline__ uint32_t* flag_of(int later) const {
    return a.arrived + ((place.cluster - later) * a.share + place.in_share) * (kWarps * C::kConsumers) + threadIdx.x / 32;
  }
  // Adds the sums of the pieces that end this job, in the order of K.
  __device__ __forceinline__ void finish_begun(Job job, int later) {
    // All lanes wait together: where the compiler sees lanes part, it gives up uniform registers in the main loop.
    for (int i = 1; i <= later; ++i)
      while (!__all_sync(~0u, ptx::load_acquire(flag_of(i)) != 0)) {}
    // Octets loaded together: one by one they would wait in a row. With two row tiles registers are short.
    constexpr int kMost = C::kRowTiles == 1 ? 8 : 4, kTogether = C::kTokens / 8 < kMost ? C::kTokens / 8 : kMost;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const Finish f = finish_of(job, r);
#pragma unroll
      for (int first = 0; first < C::kTokens / 8; first += kTogether) {
        float4 v[kTogether], one[kTogether];
#pragma unroll
        for (int o = 0; o < kTogether; ++o) v[o] = octet(r * (C::kTokens / 8) + first + o);
#pragma unroll 1
        for (int i = 1; i <= later; ++i) {
          const float4* from = partial_of((place.cluster - i) * a.share + place.in_share) +
                               (r * (C::kTokens / 8) + first) * (kThreads * C::kConsumers);
#pragma unroll
          for (int o = 0; o < kTogether; ++o) one[o] = __ldcg(from + o * (kThreads * C::kConsumers));
#pragma unroll
          for (int o = 0; o < kTogether; ++o) v[o].x += one[o].x, v[o].y += one[o].y, v[o].z += one[o].z, v[o].w += one[o].w;
        }
#pragma unroll
        for (int o = 0; o < kTogether; ++o) store(job, r, first + o, v[o], f);
      }
    }
    __syncwarp();
    if (lane == 0)
      for (int i = 1; i <= later; ++i) *flag_of(i) = 0;  // for the next launch
  }

  // Octet i belongs to part i % parts of K, whose threads get it from all parts, in places of their own.
  struct Parts {
    int count, room;  // room: octets at most of a part
    __device__ __forceinline__ explicit Parts(const Arguments& a) {
      int split = a.split;
      asm volatile("" : "+r"(split));  // opaque, or what follows is worked out before the products and takes registers through them
      count = split * C::kWays;
      room = __umulhi((C::kOctets + C::kWays - 1) / C::kWays + split - 1, a.split_inverse);
    }
  };
  __device__ __forceinline__ uint32_t sum_at(const Parts& parts, uint32_t base, int owner_way, int from, int own) const {
    return base + (((owner_way * parts.count + from) * parts.room + own) * (kThreads * C::kRowGroups) + row_group * kThreads + threadIdx.x % kThreads) * 16;
  }
  __device__ __forceinline__ int own_part() const { return place.part * C::kWays + way; }
  __device__ __forceinline__ uint32_t summed_bytes() const {  // that a block gets for a job
    int octets = 0;
    const Parts parts(a);
    for (int i = place.part * C::kWays; i < C::kOctets; i += parts.count) octets += min(C::kWays, C::kOctets - i);
    return octets * parts.count * (kThreads * C::kRowGroups) * 16;
  }
  __device__ __forceinline__ void send(uint32_t base) {
    const Parts parts(a);
    const int from = own_part();
    int to = 0, own = 0;
#pragma unroll
    for (int i = 0; i < C::kOctets; ++i) {
      const int rank = to / C::kWays * a.share + place.in_share;
      ptx::store_async(ptx::address_in(sum_at(parts, base, to % C::kWays, from, own), rank), octet(i),
                       ptx::address_in(ptx::smem_address(shared.summed), rank));
      if (++to == parts.count) to = 0, ++own;
    }
  }
  __device__ __forceinline__ void finish_split(Job job, uint32_t base, uint32_t phase) {
    const Parts parts(a);
    Finish f[C::kRowTiles];
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) f[r] = finish_of(job, r);
    ptx::mbarrier_wait(shared.summed, phase);
    int own = 0;
#pragma unroll 1
    for (int i = own_part(); i < C::kOctets; i += parts.count, ++own) {
      float4 v = ptx::load_shared(sum_at(parts, base, way, 0, own));
#pragma unroll 4
      for (int from = 1; from < parts.count; ++from) {
        const float4 one = ptx::load_shared(sum_at(parts, base, way, from, own));
        v.x += one.x, v.y += one.y, v.z += one.z, v.w += one.w;
      }
      const int r = i / (C::kTokens / 8), o = i % (C::kTokens / 8);
      Finish own_finish = f[0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // by selection: an index would put f into local memory
        own_finish.factor[half] = r == 0 ? f[0].factor[half] : f[C::kRowTiles - 1].factor[half];
        own_finish.bias[half] = r == 0 ? f[0].bias[half] : f[C::kRowTiles - 1].bias[half];
      }
      store(job, r, o, v, own_finish);
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void run(const Arguments& a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared(memory, a.x_stages, a.w_stages);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const Place place(a);
  const Range range(a, place.part, C::kWays > 1 ? kChunks : 1);
  const bool clustered = a.share * a.split > 1, summing = a.split > 1, over_stages = a.sums_offset == 0;
  const auto begin_join = [&] {
    if (clustered) ptx::cluster_arrive_relaxed();
  };
  // The end of a job: its sums are read before others send the next, or the copy engine writes over them.
  const auto part_ways = [&](bool last) {
    if (!summing || last) return;
    ptx::cluster_arrive();
    ptx::cluster_wait();
  };
  // Before sums are sent over stages, all have left the stages.
  const auto leave_stages = [&] {
    if (!summing || !over_stages) return;
    ptx::cluster_arrive();
    ptx::cluster_wait();
  };
  constexpr int kFirstProducer = kWarps * C::kConsumers;
  if (warp >= kFirstProducer) {
    const bool of_weights = warp == kFirstProducer, of_x = warp == kFirstProducer + 1;
    Ring ring{of_weights ? a.w_stages : a.x_stages};
    bool joined = !clustered;
    const auto join = [&] {  // weights do not wait for the other blocks
      if (!joined) ptx::cluster_wait();
      joined = true;
    };
    // Weights are requested before all else: the rest of the block is still on its way to the barrier.
    if (of_weights) {
      if (lane < a.w_stages) {
        ptx::mbarrier_init(shared.full_w + lane, 1);
        ptx::mbarrier_init(shared.empty_w + lane, kWarps * C::kConsumers);
      }
      ptx::fence_mbarrier_init();
      __syncwarp();
    } else if (of_x) {
      if (lane == 0) ptx::prefetch_map(&a.x);
      if (lane < a.x_stages) {
        ptx::mbarrier_init(shared.full_x + lane, 1);
        ptx::mbarrier_init(shared.empty_x + lane, kWarps * C::kConsumers * a.share);
      }
      if (lane == 0) ptx::mbarrier_init(shared.summed, 1);
      ptx::fence_mbarrier_init();
      __syncwarp();
    }
    begin_join();
    ptx::block_arrive<C::kBlock>();
    ptx::registers_down<C::kProducerRegisters>();
    asm volatile("griddepcontrol.launch_dependents;");
    if (of_x) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!of_weights && a.share > 1) join();
    Walk walk(a, place);
    Piece piece;
#pragma unroll 1
    while (walk.next(a, place, range, piece)) {
      const Job job = job_at(a, piece.job);
      if (of_weights) request_weights<C>(a, shared, place, piece, range.chunks, job, ring);
      if (of_x) request_x<C>(a, shared, place, piece, job, ring);
      __syncwarp();
      if (summing) {
        join();
        leave_stages();
        part_ways(walk.last(a));
      }
    }
    join();
  } else {
    begin_join();
    // Brings the second line of parameters: otherwise the stores wait for it.
    asm volatile("" ::"l"(a.y), "l"(a.y_stride), "l"(a.bias));
    ptx::block_sync<C::kBlock>();
    ptx::registers_up<C::kConsumerRegisters>();
    if (clustered) ptx::cluster_wait();  // nothing is sent to a block that may not have begun
    Consumer<C> consumer(a, shared, place);
    Ring x_ring{a.x_stages}, w_ring{a.w_stages};
    const uint32_t sums = ptx::smem_address(memory) + a.sums_offset;
    uint32_t phase = 0;
    Walk walk(a, place);
    Piece piece;
#pragma unroll 1
    while (walk.next(a, place, range, piece)) {
      const Job job = job_at(a, piece.job);
      if (summing && threadIdx.x == 0) ptx::mbarrier_arrive_expect(shared.summed, consumer.summed_bytes());
      consumer.multiply_piece(piece, x_ring, w_ring);
      if (!summing) {
        if (!piece.begins) {
          consumer.leave_partial();
        } else if (!piece.ends) {
          consumer.finish_begun(job, walk.later(a, place));
        } else {
          consumer.finish(job);
        }
      } else {
        leave_stages();
        consumer.send(sums);
        consumer.finish_split(job, sums, phase);
        phase ^= 1;
        part_ways(walk.last(a));
      }
    }
  }
  if (a.share > 1) {  // no block leaves while another may still signal to it
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

}  // namespace qgemm_mx::gemm
