// Checksums of weights, which find damage at the speed of memory.
//
// A checksum of 64 bits belongs to each block of the weights; the last block is filled up with zeros.
// Of each row of 512 words of 64 bits, two sums modulo 2^64 are computed: that of the words, which any
// change of one word changes, and that of low half times high half of word xor key, which depends on the
// order (NH of UMAC: Black et al., "UMAC: Fast and secure message authentication", 1999). The
// checksum is the sum of the halves of these sums times further keys (multilinear hashing: Lemire and
// Kaser, "Strongly universal string hashing is fast", 2014). build/checksum_library.py compiles it into
// a library of its own for the build of a package. Whoever may change the weights and the manifest can
// make them agree; a signature over SHA-256 digests is against that.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inductor_ext {

constexpr uint64_t kChecksumBlock = 2 << 20; // bytes

// Returns the checksum of a block of at most kChecksumBlock bytes.
extern "C" uint64_t inductor_ext_block_checksum(const uint8_t* data, size_t bytes);

} // namespace inductor_ext
