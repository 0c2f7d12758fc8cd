// Elements of K, V and queries: 16-bit floating codes (docs/numerics.md, section 1).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention_abi.h"
#include "binned.h"

namespace nearkv {

constexpr std::uint16_t kMagnitudeMask = 0x7FFF;

inline bool is_negative(std::uint16_t code) { return code >> 15 != 0; }

// Of a code's magnitude: the least that stands for no number, which is infinity's.
constexpr std::uint16_t infinity_of(const Format& format) {
    return static_cast<std::uint16_t>(((1 << format.exponent_bits) - 1) << format.fraction_bits);
}

inline bool is_nan(const Format& format, std::uint16_t code) { return (code & kMagnitudeMask) > infinity_of(format); }

inline bool is_infinite(const Format& format, std::uint16_t code) {
    return (code & kMagnitudeMask) == infinity_of(format);
}

inline bool is_zero(std::uint16_t code) { return (code & kMagnitudeMask) == 0; }

// A finite element.
inline Number element_number(const Format& format, std::uint16_t code) {
    const int magnitude = code & kMagnitudeMask;
    const int field = magnitude >> format.fraction_bits;
    const int hidden = 1 << format.fraction_bits;
    const int significand = (magnitude & (hidden - 1)) + (field ? hidden : 0);
    return {is_negative(code), static_cast<std::uint64_t>(significand), std::max(field, 1) - format.exponent_bias};
}

// How a finite element becomes a float64: its code, shifted so that its exponent begins where a double's does, times a
// power of two.
struct ToDouble {
    explicit ToDouble(const Format& format)
        : shift(52 - format.fraction_bits),
          kept(std::uint64_t{1} << 63 | std::uint64_t{kMagnitudeMask} << shift),
          scale(std::bit_cast<double>(
              static_cast<std::uint64_t>(2 * 1023 - format.exponent_bias + format.fraction_bits) << 52)),
          infinity(infinity_of(format)) {}

    double operator()(std::uint16_t magnitude) const {
        return std::bit_cast<double>(std::uint64_t{magnitude} << shift) * scale;
    }

    int shift;
    std::uint64_t kept;  // bits of a code that was extended by its sign and then shifted
    double scale;
    std::uint16_t infinity;
};

}  // namespace nearkv
