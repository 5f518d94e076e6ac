// Variants of the testbed for the experiments on single causes: formats, dequantisation sequences, stages, tile shapes, staging
// without a swizzle, and programmatic dependent launch. 31 has all factors, 27 all but dequant_issue.
#include "testbed.cuh"

using qgemm_mx::testbed::Format, qgemm_mx::testbed::Sequence;

#define FORMAT(name, format, tokens, blocks)                                                                          \
  TESTBED(testbed_##name##_t##tokens##_s4_w4x2_f31_shift_mask, blocks, Format::format, tokens, 4, 4, 2, 31,           \
          Sequence::kShiftMask)                                                                                       \
  TESTBED(testbed_##name##_t##tokens##_s4_w4x2_f27_shift_mask, blocks, Format::format, tokens, 4, 4, 2, 27,           \
          Sequence::kShiftMask)
FORMAT(nvfp4, kNvfp4, 8, 2)
FORMAT(nvfp4, kNvfp4, 16, 2)
FORMAT(nvfp4, kNvfp4, 64, 1)
FORMAT(int4_g128, kInt4, 8, 2)
FORMAT(int4_g128, kInt4, 16, 2)
FORMAT(int4_g128, kInt4, 64, 1)
#undef FORMAT

#define SEQUENCE(name, sequence, tokens)                                                                              \
  TESTBED(testbed_mxfp4_t##tokens##_s4_w4x2_f31_##name, 2, Format::kMxfp4, tokens, 4, 4, 2, 31, Sequence::sequence)
SEQUENCE(host_bits, kHostBits, 8)
SEQUENCE(host_bits, kHostBits, 16)
SEQUENCE(fp32, kFp32, 8)
SEQUENCE(fp32, kFp32, 16)
#undef SEQUENCE

#define SHAPE(stages, warps_n, warps_k)                                                                               \
  TESTBED(testbed_mxfp4_t8_s##stages##_w##warps_n##x##warps_k##_f31_shift_mask, 1, Format::kMxfp4, 8, stages, warps_n, \
          warps_k, 31, Sequence::kShiftMask)
SHAPE(2, 4, 2)
SHAPE(3, 4, 2)
SHAPE(6, 4, 2)
SHAPE(8, 4, 2)
SHAPE(4, 2, 2)
SHAPE(4, 2, 4)
SHAPE(4, 8, 1)
SHAPE(4, 1, 8)
#undef SHAPE

TESTBED(testbed_mxfp4_t8_s4_w4x2_f31_shift_mask_plain, 2, Format::kMxfp4, 8, 4, 4, 2, 31, Sequence::kShiftMask, false)
TESTBED(testbed_mxfp4_t8_s4_w4x2_f31_shift_mask_pdl, 2, Format::kMxfp4, 8, 4, 4, 2, 31, Sequence::kShiftMask, true, true)
