// Reading all weights, or parts of them, with several threads: to check them, and to copy them to a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "weights.h"

namespace inductor_ext {

// A part of the weights that is copied to memory of a GPU.
struct Upload {
  uint64_t offset = 0; // in the weights
  uint64_t bytes = 0;
  uint8_t* to = nullptr;
};

// Checks the weights against the checksums of all their blocks.
void check_weights(const WeightsFile& file, const std::vector<uint64_t>& checksums);

// Copies parts of the weights to the current GPU. The file is read into pinned buffers, from which the
// GPU copies while other blocks are read. Returns when everything has arrived. The memory must not be
// in use by the GPU any more.
// checksums: of all blocks, if there is one part and it is the whole of the weights; else empty.
void upload_weights(
    const WeightsFile& file,
    const std::vector<Upload>& parts,
    const std::vector<uint64_t>& checksums);

} // namespace inductor_ext
