// The seam of the attention kernel with Python (nearkv_sim/model/native.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_abi.h"

// Carries out jobs over a device's memory, on at most so many threads; nonzero when there was no memory for it. Nothing
// in a job is checked: pages, queries and sinks lie within the image.
extern "C" [[gnu::visibility("default")]] int nearkv_attend(const std::uint8_t* image, const nearkv::Job* jobs,
                                                            std::size_t count, unsigned threads);
