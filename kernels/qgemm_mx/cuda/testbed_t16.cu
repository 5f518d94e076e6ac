// The full factorial of the testbed in MXFP4 with 16 tokens a block: entry f<bits> has the factors of testbed.cuh's enum.
#include "testbed.cuh"

using qgemm_mx::testbed::Format, qgemm_mx::testbed::Sequence;

#define V(factors) \
  TESTBED(testbed_mxfp4_t16_s4_w4x2_f##factors##_shift_mask, 2, Format::kMxfp4, 16, 4, 4, 2, factors, Sequence::kShiftMask)
// clang-format off
V(0) V(1) V(2) V(3) V(4) V(5) V(6) V(7)
V(8) V(9) V(10) V(11) V(12) V(13) V(14) V(15)
V(16) V(17) V(18) V(19) V(20) V(21) V(22) V(23)
V(24) V(25) V(26) V(27) V(28) V(29) V(30) V(31)
// clang-format on
#undef V
