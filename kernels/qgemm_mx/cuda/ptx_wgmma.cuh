// Warpgroup matrix instructions and what their operands need, one thin wrapper each.
// PTX ISA 9.0: wgmma (9.7.15), matrix descriptor (9.7.15.5.1), cp.async.bulk.tensor (9.7.9.25.5), mapa (9.7.9.22),
// barrier.cluster (9.7.13.4), movmatrix (9.7.14.5.17). sm_90a alone.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "ptx_memory.cuh"

namespace qgemm_mx::ptx {

// ---- wgmma --------------------------------------------------------------------------------------------------------------------

// B in shared memory, K-major, swizzle of 128 bytes: 8 rows of 128 bytes are an atom of 1024 bytes, atoms follow each other.
// Constraint: `smem` is the start of an atom plus a multiple of 32 bytes, a k16 step inside the row.
__device__ __forceinline__ uint64_t descriptor_b(uint32_t smem) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kAtomStride = (1024ull >> 4) << 32, kIgnored = 1ull << 16;
  return kSwizzle128 | kAtomStride | kIgnored | ((smem & 0x3FFFFu) >> 4);
}

// Registers written before are visible to the wgmma that follow; needed before the first and after every change of A or D.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// D[64, n] (+)= A[64, 16] B[n, 16]^T: A in registers, the fragment of mma.m16n8k16 for each warp's 16 rows; `add` 0 drops the old D.
template <int n, bool half>
struct Wgmma;

#define QG_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define QG_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QG_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define QG_D32 QG_TEN() QG_TEN(1) QG_TEN(2) "%30, %31"
#define QG_D64 QG_TEN() QG_TEN(1) QG_TEN(2) QG_TEN(3) QG_TEN(4) QG_TEN(5) "%60, %61, %62, %63"
#define QG_D128                                                                                                         \
  QG_TEN() QG_TEN(1) QG_TEN(2) QG_TEN(3) QG_TEN(4) QG_TEN(5) QG_TEN(6) QG_TEN(7) QG_TEN(8) QG_TEN(9) QG_TEN(10) QG_TEN(11) \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define QG_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QG_F8(i) QG_F4(i), QG_F4(i + 4)
#define QG_F16(i) QG_F8(i), QG_F8(i + 8)
#define QG_F32(i) QG_F16(i), QG_F16(i + 16)
#define QG_F64(i) QG_F32(i), QG_F32(i + 32)
#define QG_F128(i) QG_F64(i), QG_F64(i + 64)
#define QG_WGMMA(n, half, type, list, outputs, count, a0, a1, a2, a3, b, p)                                              \
  template <>                                                                                                           \
  struct Wgmma<n, half> {                                                                                                \
    static __device__ __forceinline__ void run(float (&d)[count], const uint32_t (&a)[4], uint64_t descriptor, int add) { \
      asm volatile(                                                                                                      \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %" #p ", 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, {%" #a0 ", %" #a1 ", %" #a2      \
          ", %" #a3 "}, %" #b ", add, 1, 1, 0;\n}\n"                                                                     \
          : outputs(0)                                                                                                   \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add));                                      \
    }                                                                                                                    \
  };
#define QG_BOTH(n, list, outputs, count, a0, a1, a2, a3, b, p)                    \
  QG_WGMMA(n, false, "bf16", list, outputs, count, a0, a1, a2, a3, b, p)           \
  QG_WGMMA(n, true, "f16", list, outputs, count, a0, a1, a2, a3, b, p)
QG_BOTH(16, QG_D8, QG_F8, 8, 8, 9, 10, 11, 12, 13)
QG_BOTH(32, QG_D16, QG_F16, 16, 16, 17, 18, 19, 20, 21)
QG_BOTH(64, QG_D32, QG_F32, 32, 32, 33, 34, 35, 36, 37)
QG_BOTH(128, QG_D64, QG_F64, 64, 64, 65, 66, 67, 68, 69)
QG_BOTH(256, QG_D128, QG_F128, 128, 128, 129, 130, 131, 132, 133)
#undef QG_BOTH
#undef QG_WGMMA
#undef QG_F128
#undef QG_F64
#undef QG_F32
#undef QG_F16
#undef QG_F8
#undef QG_F4
#undef QG_D128
#undef QG_D64
#undef QG_D32
#undef QG_D16
#undef QG_D8
#undef QG_TEN

// 8 x 8 values of 16 bits: lane 4r + c gives columns 2c and 2c + 1 of row r, and gets rows 2c and 2c + 1 of column r.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

// ---- registers ----------------------------------------------------------------------------------------------------------------

// Moves registers between warpgroups of a block (setmaxnreg, 9.7.20.5). Constraint: all warps of a warpgroup, and what one takes
// another has given.
template <int count>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- flags in memory ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// ---- barriers of a block --------------------------------------------------------------------------------------------------------

// Barrier 0, on which some warps wait and the others only arrive.
template <int threads>
__device__ __forceinline__ void block_arrive() {
  asm volatile("barrier.cta.arrive 0, %0;" ::"n"(threads) : "memory");
}
template <int threads>
__device__ __forceinline__ void block_sync() {
  asm volatile("barrier.cta.sync 0, %0;" ::"n"(threads) : "memory");
}

// ---- tensor maps --------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box at column k and row m of a matrix, in the map's swizzle; rows and columns that are not there come as zeros and count.
__device__ __forceinline__ void tensor_load(void* smem, const CUtensorMap* map, int k, int m, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          smem_address(smem)),
      "l"(map), "r"(k), "r"(m), "r"(smem_address(barrier))
      : "memory");
}

// The same into the blocks of the cluster that `blocks` has bits of, at the same offsets, each counted on its own barrier.
__device__ __forceinline__ void tensor_load_multicast(void* smem, const CUtensorMap* map, int k, int m, uint64_t* barrier,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
      "[%4], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(k), "r"(m), "r"(smem_address(barrier)), "h"(blocks)
      : "memory");
}

// ---- clusters -----------------------------------------------------------------------------------------------------------------

// The address in block `rank` of the cluster of what lies at `smem` here.
__device__ __forceinline__ uint32_t address_in(uint32_t smem, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem), "r"(rank));
  return there;
}

// 16 bytes to shared memory of a block of the cluster, counted on a barrier there (st.async, 9.7.9.12). Constraint, found on the
// device: the launch has a cluster of two blocks or more, or the instruction is illegal.
__device__ __forceinline__ void store_async(uint32_t there, float4 v, uint32_t barrier_there) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there), "f"(v.x),
               "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier_there)
               : "memory");
}

__device__ __forceinline__ float4 load_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_in(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(smem_address(barrier), rank))
               : "memory");
}

// Relaxed: where nothing but barriers made ready, which have a fence of their own, is to be seen by the others.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

}  // namespace qgemm_mx::ptx
