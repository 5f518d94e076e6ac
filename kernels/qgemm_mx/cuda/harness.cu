// Helper kernels of the measurement harness: they prepare or bracket a measurement and are never a result.
#include <cstdint>

// Does nothing. Launched with another kernel's grid, block and shared memory it shows that kernel's launch floor.
extern "C" __global__ void __launch_bounds__(1024) empty() {}

// Keeps the stream busy for `nanoseconds`, so that everything of a leg is queued before its first event is reached and
// no host latency can enter the measured time.
extern "C" __global__ void delay(uint64_t nanoseconds) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

// Fills words64 8-byte words with SplitMix64 of (seed + index) (Steele, Lea, Flood 2014). Counter based: any part can be
// recomputed on the host, which is how the stream's checksum is verified.
extern "C" __global__ void fill_random(uint64_t* out, uint64_t words64, uint64_t seed) {
  for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < words64; i += uint64_t(gridDim.x) * blockDim.x) {
    uint64_t z = (seed + i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    out[i] = z ^ (z >> 31);
  }
}

// Maps bytes through a table of 256 16-bit (or 8-bit) values: random bytes become samples of any distribution.
extern "C" __global__ void map_bytes_u8(const uint8_t* in, uint8_t* out, uint64_t n, const uint8_t* table) {
  for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < n; i += uint64_t(gridDim.x) * blockDim.x)
    out[i] = table[in[i]];
}

extern "C" __global__ void map_words_u16(const uint16_t* in, uint16_t* out, uint64_t n, const uint16_t* table) {
  for (uint64_t i = blockIdx.x * uint64_t(blockDim.x) + threadIdx.x; i < n; i += uint64_t(gridDim.x) * blockDim.x)
    out[i] = table[in[i]];
}
