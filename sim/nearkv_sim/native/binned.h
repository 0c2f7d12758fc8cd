// The contract's binned sums and scores in plain integers (docs/numerics.md, sections 2 to 4): what sets every bit of
// the attention kernel where its float64 lanes do not reach, and what merges and finishes its sums.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention_abi.h"

namespace nearkv {

constexpr int kBinShift = std::bit_width(static_cast<unsigned>(kBinBits)) - 1;
constexpr std::uint64_t kLimbMask = (std::uint64_t{1} << kBinBits) - 1;

// bits(value) of the contract.
inline int length_of(std::uint64_t value) { return 64 - std::countl_zero(value); }

// (-1)^negative * significand * 2^exponent.
struct Number {
    bool negative;
    std::uint64_t significand;
    std::int64_t exponent;
};

// A binned sum: top bin (kTopNone where it is empty) and the two limbs.
struct Sum {
    std::int64_t top = kTopNone;
    std::int64_t high = 0;
    std::int64_t low = 0;

    void merge(const Sum& other) {
        const std::int64_t larger = std::max(top, other.top);
        lower(larger);
        Sum second = other;
        second.lower(larger);
        high += second.high;
        low += second.low;
    }

    // Adds a term whose significand has at most 48 bits.
    void add(const Number& term) {
        if (term.significand == 0) return;
        const std::int64_t bin = (term.exponent + length_of(term.significand) - 1) >> kBinShift;
        // The leading one comes to lie in bits 32 to 63.
        const std::int64_t shift = term.exponent - kBinBits * (bin - 1);
        const std::uint64_t a = shift < 0 ? term.significand >> -shift : term.significand << shift;
        const auto upper = static_cast<std::int64_t>(a >> kBinBits);
        const auto rest = static_cast<std::int64_t>(a & kLimbMask);
        merge(term.negative ? Sum{bin, -upper, -rest} : Sum{bin, upper, rest});
    }

    // Sees the sum from a top bin that is not below its own.
    void lower(std::int64_t larger) {
        if (top == larger) return;
        low = larger - top == 1 ? high : 0;
        high = 0;
        top = larger;
    }

    // The value with its magnitude truncated to `bits` bits, at most 62; negative is false for zero.
    Number truncated(int bits) const {
        const __int128 value = (static_cast<__int128>(high) << kBinBits) + low;
        auto magnitude = static_cast<unsigned __int128>(value < 0 ? -value : value);
        const auto upper = static_cast<std::uint64_t>(magnitude >> 64);
        const int length = upper ? 64 + length_of(upper) : length_of(static_cast<std::uint64_t>(magnitude));
        const int shift = std::max(length - bits, 0);
        magnitude >>= shift;
        return {value < 0, static_cast<std::uint64_t>(magnitude), kBinBits * (top - 1) + shift};
    }
};

// A finite float32 by its bits.
inline Number float32_number(std::uint32_t bits) {
    const std::uint32_t field = bits >> 23 & 0xFF;
    const std::uint32_t fraction = bits & 0x7FFFFF;
    return {bits >> 31 != 0, field ? fraction + (1u << 23) : fraction, std::max<std::int64_t>(field, 1) - 150};
}

// significand * 2^exponent, its significand below 2^57, to the nearest integer, ties away from zero, saturated.
inline std::int64_t rounded_score(const Number& number) {
    const std::uint64_t m = number.significand;
    std::uint64_t magnitude;
    if (number.exponent >= 0) {
        const bool large = m != 0 && number.exponent + length_of(m) > length_of(kScoreLimit);
        magnitude = large ? kScoreLimit : m << (m ? number.exponent : 0);
    } else {
        const std::int64_t down = std::min<std::int64_t>(-number.exponent, 60);
        magnitude = std::min((m + (std::uint64_t{1} << (down - 1))) >> down, std::uint64_t{kScoreLimit});
    }
    const auto score = static_cast<std::int64_t>(magnitude);
    return number.negative ? -score : score;
}

// The score S of a row whose dot product is `dot`, `factor` being c.
inline std::int64_t score_of(const Sum& dot, const Number& factor) {
    const Number kept = dot.truncated(kDotKeptBits);
    if (kept.significand == 0) return 0;
    return rounded_score({kept.negative != factor.negative, kept.significand * factor.significand,
                          kept.exponent + factor.exponent + kScoreFractionBits});
}

// The score under a softcap (section 8), of its argument.
inline std::int64_t capped(std::int64_t argument, const Number& cap) {
    const auto size = static_cast<std::uint64_t>(argument < 0 ? -argument : argument);
    std::int64_t tanh = std::int64_t{1} << kTanhFractionBits;
    for (const TanhOctave& octave : kTanhOctaves) {
        if (size >> octave.bits) continue;
        const TanhSegment& segment = kTanhTable[octave.first + static_cast<int>(size >> octave.width)];
        const auto place = static_cast<std::int64_t>(size >> (octave.width - kTanhStepBits) &
                                                     ((std::uint64_t{1} << kTanhStepBits) - 1));
        constexpr int kStep = kTanhStepBits - 1;
        constexpr int kCurve = kTanhCurveBits - 1;
        const std::int64_t curve = segment.c * (place >> (kTanhStepBits - kTanhCurveBits));
        const std::int64_t slope = segment.b + ((curve + (std::int64_t{1} << kCurve)) >> (kCurve + 1));
        tanh = segment.t + ((slope * place + (std::int64_t{1} << kStep)) >> (kStep + 1));
        break;
    }
    return rounded_score({argument < 0, static_cast<std::uint64_t>(tanh) * cap.significand,
                          cap.exponent + kScoreFractionBits - kTanhFractionBits});
}

// ALiBi's bias (section 9).
inline std::int64_t bias(const Number& slope, std::int64_t distance) {
    const auto size = static_cast<std::uint64_t>(distance < 0 ? -distance : distance);
    return rounded_score({slope.negative != (distance < 0), size * slope.significand,
                          slope.exponent + kScoreFractionBits});
}

// A weight p * 2^(n - kWeightFractionBits).
struct Weight {
    std::int64_t n;
    std::int64_t p;

    Number number() const { return {false, static_cast<std::uint64_t>(p), n - kWeightFractionBits}; }
};

inline Weight weight_of(std::int64_t score) {
    constexpr int kDrop = kTableFractionBits - kWeightFractionBits + kTableStepBits;
    const auto fraction = static_cast<std::uint64_t>(score) & ((std::uint64_t{1} << kScoreFractionBits) - 1);
    const std::uint64_t index = fraction >> kTableStepBits;
    const auto rest = static_cast<std::int64_t>(fraction & ((std::uint64_t{1} << kTableStepBits) - 1));
    const std::int64_t begin = kExp2Table[index];
    const std::int64_t step = kExp2Table[index + 1] - begin;
    const std::int64_t p = ((begin << kTableStepBits) + step * rest + (std::int64_t{1} << (kDrop - 1))) >> kDrop;
    return {score >> kScoreFractionBits, std::min(p, (std::int64_t{1} << kWeightBits) - 1)};
}

}  // namespace nearkv
