// Elements of K, V and queries, and scales: codes to numbers (docs/numerics.md, section 1).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention_abi.h"
#include "binned.h"

namespace nearkv {

constexpr std::uint16_t kMagnitudeMask = 0x7FFF;

// What a code stands for, NaN and infinities included; exact.
inline double element_value(const Format& format, unsigned code) {
    if (format.exponent_bits == 0) {  // an integer
        const int half = 1 << (format.bits - 1);
        return (static_cast<int>(code) + half) % (2 * half) - half;
    }
    const int fields = format.exponent_bits + format.fraction_bits;
    const auto magnitude = static_cast<int>(code & ((1u << fields) - 1));
    const int field = magnitude >> format.fraction_bits;
    const int fraction = magnitude & ((1 << format.fraction_bits) - 1);
    if (format.power) return magnitude == (1 << fields) - 1 ? NAN : std::ldexp(1.0, magnitude - format.exponent_bias);
    double value = std::ldexp(fraction + (field ? 1 << format.fraction_bits : 0),
                              std::max(field, 1) - format.exponent_bias);
    if (format.infinities && field == (1 << format.exponent_bits) - 1) value = fraction ? NAN : INFINITY;
    if (magnitude == format.nan_code) value = NAN;
    return code >> fields ? -value : value;
}

// A finite double of at most 24 significant bits as an integer and an exponent.
inline Number number_of(double x) {
    constexpr int kDropped = 29;
    const auto bits = std::bit_cast<std::uint64_t>(x);
    const auto field = static_cast<std::int64_t>(bits >> 52 & 0x7FF);
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    if (field == 0) return {bits >> 63 != 0, 0, 0};
    return {bits >> 63 != 0, (fraction | std::uint64_t{1} << 52) >> kDropped, field - 1023 - 52 + kDropped};
}

// How a finite element of 16 bits becomes a float64: its code, shifted so that its exponent begins where a double's
// does, times a power of two.
struct ToDouble {
    explicit ToDouble(const Format& format)
        : shift(52 - format.fraction_bits),
          kept(std::uint64_t{1} << 63 | std::uint64_t{kMagnitudeMask} << shift),
          scale(std::bit_cast<double>(
              static_cast<std::uint64_t>(2 * 1023 - format.exponent_bias + format.fraction_bits) << 52)),
          infinity(static_cast<std::uint16_t>(((1 << format.exponent_bits) - 1) << format.fraction_bits)) {}

    double operator()(std::uint16_t magnitude) const {
        return std::bit_cast<double>(std::uint64_t{magnitude} << shift) * scale;
    }

    int shift;
    std::uint64_t kept;  // bits of a code that was extended by its sign and then shifted
    double scale;
    std::uint16_t infinity;  // of a code's magnitude: the least that stands for no number
};

}  // namespace nearkv
