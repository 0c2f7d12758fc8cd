// Rows of elements, with their scales, as float64 lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_abi.h"
#include "elements.h"
#include "lanes.h"

namespace nearkv {

// What a row came to: its largest magnitude, and whether it holds anything that is no number.
struct Decoded {
    double peak;
    bool special;
};

class Decoder {
public:
    // `scale` is null for rows without scales; a scale is shared by `block` elements, 0 for all. `codebook` holds
    // kLutEntries fp16 codes where codes are indices.
    Decoder(const Format& format, std::size_t dim, const Format* scale = nullptr, std::size_t block = 0,
            const std::uint16_t* codebook = nullptr);

    // A row's elements, kLanes at a time, `stride` values apart, zero beyond the row's end; what is no number becomes
    // some number.
    Decoded decode(const std::uint8_t* codes, const std::uint8_t* scales, Box<Doubles>* to, std::size_t stride) const;

    // One element, NaN and infinities included.
    double at(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t index) const;

private:
    Decoded decode_wide(const std::uint8_t* codes, Box<Doubles>* to, std::size_t stride) const;
    template <int Bits>
    Decoded decode_narrow(const std::uint8_t* codes, const std::uint8_t* scales, Box<Doubles>* to,
                          std::size_t stride) const;
    double scale_at(const std::uint8_t* scales, std::size_t index) const;

    const Format& format_;
    std::size_t dim_;
    const Format* scale_;
    std::size_t block_;
    ToDouble convert_;
    std::vector<double> numbers_;  // of all codes of a narrow format
    std::vector<double> scales_;   // of all codes of a narrow scale format
};

}  // namespace nearkv
