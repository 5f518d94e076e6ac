// stream_read: reads a run of bytes once, as fast as the memory system gives them. It is the measured denominator.
//
// Two load styles: 16-byte loads to registers, and bulk copies to shared memory (sm_90). With `check` set, every thread
// stores the XOR of the words it saw to sink[global thread], so the same cubin that is timed proves that each byte was
// read. Without it nothing is stored unless the XOR equals a value that the caller makes improbable: that dependence keeps
// the compiler from deleting the loads.
#include "ptx_memory.cuh"

namespace {
using namespace qgemm_mx;

__device__ __forceinline__ uint32_t fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// words16: number of 16-byte words. Each block walks tiles of blockDim.x * kUnroll words; all loads of a tile are issued
// before the first is used, because bytes in flight set the bandwidth (Little's law).
template <int kUnroll>
__device__ __forceinline__ void stream_registers(const uint4* source, uint64_t words16, uint32_t* sink,
                                                 uint32_t improbable, uint32_t check) {
  uint32_t seen = 0;
  const uint64_t tile = uint64_t(blockDim.x) * kUnroll;
  for (uint64_t base = blockIdx.x * tile; base < words16; base += gridDim.x * tile) {
    const uint4* first = source + base + threadIdx.x;
    if (base + tile <= words16) {
      uint4 value[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) value[i] = ptx::load_stream(first + i * blockDim.x);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) seen ^= fold(value[i]);
    } else {
      for (uint64_t word = base + threadIdx.x; word < words16; word += blockDim.x)
        seen ^= fold(ptx::load_stream(source + word));
    }
  }
  if (check || seen == improbable) sink[blockIdx.x * blockDim.x + threadIdx.x] = seen;
}
}  // namespace

#define STREAM_REGISTERS(unroll)                                                                                      \
  extern "C" __global__ void __launch_bounds__(512, 2)                                                                \
      stream_registers_u##unroll(const uint4* source, uint64_t words16, uint32_t* sink, uint32_t improbable,          \
                                 uint32_t check) {                                                                    \
    stream_registers<unroll>(source, words16, sink, improbable, check);                                               \
  }
STREAM_REGISTERS(2)
STREAM_REGISTERS(4)
STREAM_REGISTERS(8)
#undef STREAM_REGISTERS

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// One warp a block; lane 0 keeps a ring of `stages` bulk copies of `chunk_bytes` each in flight.
// Shared memory: stages * chunk_bytes of ring, then one mbarrier a stage.
extern "C" __global__ void __launch_bounds__(32)
    stream_bulk(const uint8_t* source, uint64_t bytes, uint32_t* sink, uint32_t chunk_bytes, uint32_t stages,
                uint32_t check) {
  extern __shared__ __align__(128) uint8_t ring[];
  uint64_t* full = reinterpret_cast<uint64_t*>(ring + uint64_t(stages) * chunk_bytes);
  const uint64_t chunks = (bytes + chunk_bytes - 1) / chunk_bytes;
  const uint32_t lane = threadIdx.x;
  const auto size_of = [&](uint64_t chunk) {
    const uint64_t left = bytes - chunk * chunk_bytes;
    return uint32_t(left < chunk_bytes ? left : chunk_bytes);
  };
  const auto issue = [&](uint64_t chunk, uint32_t stage) {
    ptx::mbarrier_arrive_expect(full + stage, size_of(chunk));
    ptx::bulk_load(ring + uint64_t(stage) * chunk_bytes, source + chunk * chunk_bytes, size_of(chunk), full + stage);
  };

  if (lane == 0) {
    for (uint32_t stage = 0; stage < stages; ++stage) ptx::mbarrier_init(full + stage, 1);
    ptx::fence_mbarrier_init();
    for (uint32_t stage = 0; stage < stages; ++stage) {
      const uint64_t chunk = blockIdx.x + uint64_t(stage) * gridDim.x;
      if (chunk < chunks) issue(chunk, stage);
    }
  }
  __syncwarp();

  uint32_t seen = 0, stage = 0, phase = 0;
  for (uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    ptx::mbarrier_wait(full + stage, phase);
    if (check) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(ring + uint64_t(stage) * chunk_bytes);
      for (uint32_t word = lane; word < size_of(chunk) / 4; word += 32) seen ^= words[word];
      ptx::fence_proxy_async();
      __syncwarp();
    }
    const uint64_t next = chunk + uint64_t(stages) * gridDim.x;
    if (lane == 0 && next < chunks) issue(next, stage);
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  if (check) sink[blockIdx.x * 32 + lane] = seen;
}
#endif
