// Memory instructions, one thin wrapper each.
// PTX ISA 9.0: ld (9.7.9.8), cp.async.bulk (9.7.9.25.4), mbarrier (9.7.13.15).
#pragma once
#include <cstdint>

namespace qgemm_mx::ptx {

// 16-byte read-only load that leaves L1 to the data that is read again.
// Constraint: `address` is 16-byte aligned; a misaligned one faults.
__device__ __forceinline__ uint4 load_stream(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copy of 4, 8 or 16 bytes gmem -> smem by this thread; complete after cp.async.wait_group.
// Constraint: both addresses are multiples of `bytes`.
template <int bytes>
__device__ __forceinline__ void copy_async(void* smem, const void* gmem) {
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(smem_address(smem)), "l"(gmem) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(smem_address(smem)), "l"(gmem), "n"(bytes)
                 : "memory");
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Orders mbarrier.init before the copy engine (the async proxy) may signal it.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(phase)
      : "memory");
}

// Bulk copy gmem -> smem by the copy engine; completion is counted in bytes on `barrier`.
// Constraint: both addresses 16-byte aligned, `bytes` a multiple of 16.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(smem)),
               "l"(gmem), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

// Orders this thread's earlier reads of a stage before the copy engine overwrites it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace qgemm_mx::ptx
