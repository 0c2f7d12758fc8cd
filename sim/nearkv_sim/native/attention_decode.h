// Rows of elements, with their scales, as float64 lanes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
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

using Codes16 = std::int16_t __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kCodesPerLine = kLineBytes / 2;

// Elements as doubles; what stands for no number becomes some number.
inline Doubles decoded(const std::uint8_t* codes, const ToDouble& convert) {
    return doubles((extended(codes) << convert.shift) & convert.kept) * convert.scale;
}

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
    ToDouble scale_convert_;
    std::vector<double> numbers_;  // of all codes of a narrow format
    std::vector<double> scales_;   // of all codes of a narrow scale format
};

// Rows of 16-bit elements are what most caches hold: their loop is where it is used.
[[gnu::always_inline]] inline Decoded Decoder::decode_wide(const std::uint8_t* codes, Box<Doubles>* to,
                                                           std::size_t stride) const {
    Codes16 peaks{};
    const ToDouble convert = convert_;
    const auto add_line = [&](const std::uint8_t* line, std::size_t lanes) {
        for (std::size_t at = 0; at < kLineBytes; at += kVectorBytes) {
            const Codes16 some = load<Codes16>(line + at) & static_cast<std::int16_t>(kMagnitudeMask);
            peaks = some > peaks ? some : peaks;
        }
#pragma GCC unroll 4
        for (std::size_t lane = 0; lane < lanes; lane += kLanes) {
            to->value = decoded(line + 2 * lane, convert);
            to += stride;
        }
    };
    for (std::size_t i = 0; i < dim_ / kCodesPerLine; i++) add_line(codes + i * kLineBytes, kCodesPerLine);
    if (const std::size_t rest = dim_ % kCodesPerLine) {
        std::array<std::uint8_t, kLineBytes> line{};
        std::memcpy(line.data(), codes + dim_ / kCodesPerLine * kLineBytes, 2 * rest);
        add_line(line.data(), rest);
    }
    std::int16_t peak = 0;
    for (std::size_t i = 0; i < kVectorBytes / 2; i++) peak = std::max(peak, peaks[i]);
    const auto code = static_cast<std::uint16_t>(peak);
    return {convert(code), code >= convert.infinity};
}

[[gnu::always_inline]] inline Decoded Decoder::decode(const std::uint8_t* codes, const std::uint8_t* scales,
                                                      Box<Doubles>* to, std::size_t stride) const {
    if (format_.bits == 16) return decode_wide(codes, to, stride);
    return format_.bits == 8 ? decode_narrow<8>(codes, scales, to, stride)
                             : decode_narrow<4>(codes, scales, to, stride);
}

}  // namespace nearkv
