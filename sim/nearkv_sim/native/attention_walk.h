// From descriptors to jobs: good ones are checked and walked here, all of a doorbell in one call. What is wrong with any
// other is for Python to find (nearkv_sim/model/walker.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_abi.h"

// Looks at descriptors of one kind, [count][kLineBytes]. For each that is good: its job gets what the template lacks
// (rows, entries, queries, sinks, factors; a result goes to its place in `staging`), `result_lines` the line of its result,
// `streamed` [count][slices] the K and V lines of a pass, and `reads` [slices] grows by the lines read through the
// fabric. For the others `result_lines` is -1. Nothing that a descriptor, table or entry holds leads beyond the memory.
extern "C" [[gnu::visibility("default")]] void nearkv_walk(const nearkv::Device* device, const nearkv::Kind* kind,
                                                           std::int64_t tenant, const std::uint8_t* descriptors,
                                                           std::size_t count, std::uint8_t* staging,
                                                           nearkv::Job* jobs, std::int64_t* result_lines,
                                                           std::int64_t* streamed, std::int64_t* reads);
