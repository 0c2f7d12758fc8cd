#include "attention_partial.h"

#include <algorithm>
#include <cstring>

namespace nearkv {
namespace {

// An output format: bits, bits of its fraction, exponent of its least normal number, code of its NaN.
struct Output {
    int bits;
    int fraction_bits;
    int least_exponent;
    std::uint32_t nan;

    std::uint32_t sign() const { return std::uint32_t{1} << (bits - 1); }
    std::uint32_t infinity() const { return (sign() - 1) >> fraction_bits << fraction_bits; }
};

constexpr Output kFloat32{32, 23, -126, kNanFp32};
constexpr Output kBfloat16{16, 7, -126, kNanBf16};
constexpr Output kFloat16{16, 10, -14, kNanFp16};

const Output& output_of(std::int32_t form) {
    return form == kFormFp32 ? kFloat32 : form == kFormBf16 ? kBfloat16 : kFloat16;
}

// The code of magnitude * 2^exponent, rounded to nearest even; magnitude is 0, or in 2^29 to 2^62.
std::uint32_t rounded(std::uint64_t magnitude, std::int64_t exponent, const Output& output) {
    if (magnitude == 0) return 0;
    const std::int64_t leading = length_of(magnitude) - 1 + exponent;
    const std::int64_t step = std::max<std::int64_t>(leading, output.least_exponent);
    if (step > -output.least_exponent + 1) return output.infinity();
    const std::int64_t shift = step - output.fraction_bits - exponent;
    if (shift > 63) return 0;
    std::uint64_t kept = magnitude >> shift;
    const std::uint64_t rest = magnitude & ((std::uint64_t{1} << shift) - 1);
    const std::uint64_t half = std::uint64_t{1} << (shift - 1);
    if (rest > half || (rest == half && kept & 1)) kept++;
    // The hidden bit, and a carry out of the fraction, move the exponent field up by themselves.
    const auto field = static_cast<std::uint64_t>(step - output.least_exponent) << output.fraction_bits;
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(field + kept, output.infinity()));
}

// A denominator as what lanes are multiplied by: reciprocal * 2^exponent.
struct Reciprocal {
    explicit Reciprocal(const Sum& denominator) {
        if (denominator.top == kTopNone) return;
        const Number kept = denominator.truncated(kDenominatorBits);
        const int missing = kDenominatorBits - length_of(kept.significand);
        reciprocal = (std::uint64_t{1} << kReciprocalBits) / (kept.significand << missing);
        exponent = -(kept.exponent - missing) - kReciprocalBits;
    }

    std::uint64_t reciprocal = 0;
    std::int64_t exponent = 0;
};

std::uint32_t lane_code(const Sum& sum, std::uint8_t flags, const Reciprocal& scale, const Output& output) {
    if (flags & kLaneNan) return output.nan;
    if (flags & kLanePositiveInfinity) return flags & kLaneNegativeInfinity ? output.nan : output.infinity();
    if (flags & kLaneNegativeInfinity) return output.infinity() | output.sign();
    const Number kept = sum.truncated(kNumeratorKeptBits);
    const std::uint64_t magnitude = kept.significand * scale.reciprocal;
    if (magnitude == 0) return 0;
    return rounded(magnitude, kept.exponent + scale.exponent, output) | (kept.negative ? output.sign() : 0);
}

// A float32 code times a float32, in one IEEE multiplication.
std::uint32_t multiplied(std::uint32_t code, std::uint32_t factor) {
    const std::uint32_t sign = (code ^ factor) & kFloat32.sign();
    const std::uint32_t size = code & ~kFloat32.sign();
    const std::uint32_t other = factor & ~kFloat32.sign();
    const std::uint32_t infinity = kFloat32.infinity();
    if (size > infinity || other > infinity) return kFloat32.nan;
    if (size == infinity || other == infinity) return size == 0 || other == 0 ? kFloat32.nan : infinity | sign;
    const Number a = float32_number(size);
    const Number b = float32_number(other);
    const std::uint64_t product = a.significand * b.significand;
    const int lift = 62 - length_of(product);
    return rounded(product << lift, a.exponent + b.exponent - lift, kFloat32) | sign;
}

// A float32 code in another output format.
std::uint32_t narrowed(std::uint32_t code, const Output& output) {
    if (output.bits == 32) return code;
    const std::uint32_t size = code & ~kFloat32.sign();
    const std::uint32_t sign = code & kFloat32.sign() ? output.sign() : 0;
    if (size >= kFloat32.infinity()) return size > kFloat32.infinity() ? output.nan : output.infinity() | sign;
    const Number number = float32_number(size);
    return rounded(number.significand << 32, number.exponent - 32, output) | sign;
}

template <typename Value>
void put(std::uint8_t* to, std::size_t index, Value value) {
    std::memcpy(to + index * sizeof value, &value, sizeof value);
}

}  // namespace

void Partial::merge(const Partial& other) {
    for (std::size_t query = 0; query < queries_; query++) {
        denominators_[query].merge(other.denominators_[query]);
        nan_[query] |= other.nan_[query];
    }
    for (std::size_t i = 0; i < numerators_.size(); i++) {
        LaneSums& mine = numerators_[i];
        LaneSums theirs = other.numerators_[i];
        const Integers larger = mine.top > theirs.top ? mine.top : theirs.top;
        mine.lower(larger);
        theirs.lower(larger);
        mine.high += theirs.high;
        mine.low += theirs.low;
    }
    for (std::size_t i = 0; i < flags_.size(); i++) flags_[i] |= other.flags_[i];
}

void Partial::add_sinks(const std::uint32_t* sinks) {
    for (std::size_t query = 0; query < queries_; query++) {
        const std::uint32_t bits = sinks[query % group_];
        const bool special = (bits >> 23 & 0xFF) == 0xFF;
        if (special && bits != kFloat32.infinity() + kFloat32.sign()) set_nan(query);
        if (special) continue;
        Number sink = float32_number(bits);
        sink.significand *= kSinkFactor;
        sink.exponent += kSinkFactorExponent + kScoreFractionBits;
        denominators_[query].add(weight_of(rounded_score(sink)).number());
    }
}

void Partial::write(const Job& job) {
    for (std::size_t query = 0; query < queries_; query++) {
        if (nan(query)) forget(query);
        std::uint8_t* out = job.result + query * static_cast<std::size_t>(job.result_bytes);
        std::memset(out, 0, static_cast<std::size_t>(job.result_bytes));
        (job.form == kFormPartial) ? write_states(job, out, query) : write_codes(job, out, query);
        write_denominator(out + job.denominator, query);
    }
}

// What was summed before the NaN depends on how rows were dealt to threads.
void Partial::forget(std::size_t query) {
    denominators_[query] = Sum();
    std::fill_n(numerators(query), blocks_, LaneSums());
    std::fill_n(&flags(query, 0), lanes_, std::uint8_t{0});
}

void Partial::write_states(const Job& job, std::uint8_t* out, std::size_t query) {
    for (std::size_t lane = 0; lane < lanes_; lane++) {
        const Sum sum = numerators(query)[lane / kLanes].at(lane % kLanes);
        put(out, lane, static_cast<std::int32_t>(sum.top));
        put(out + job.high, lane, sum.high);
        put(out + job.low, lane, sum.low);
        put(out + job.flags, lane, flags(query, lane));
    }
}

void Partial::write_codes(const Job& job, std::uint8_t* out, std::size_t query) {
    const Output& output = output_of(job.form);
    const Output& first = job.output_scale ? kFloat32 : output;
    const Reciprocal scale(denominators_[query]);
    for (std::size_t lane = 0; lane < lanes_; lane++) {
        const Sum sum = numerators(query)[lane / kLanes].at(lane % kLanes);
        std::uint32_t code = nan(query) ? first.nan : lane_code(sum, flags(query, lane), scale, first);
        if (job.output_scale) code = narrowed(multiplied(code, job.output_scale), output);
        if (output.bits == 32) {
            put(out, lane, code);
        } else {
            put(out, lane, static_cast<std::uint16_t>(code));
        }
    }
}

void Partial::write_denominator(std::uint8_t* line, std::size_t query) {
    const Sum& sum = denominators_[query];
    put(line + kDenominatorTop, 0, static_cast<std::int32_t>(sum.top));
    put(line + kDenominatorFlags, 0, static_cast<std::uint8_t>(nan_[query] ? kQueryNan : 0));
    put(line + kDenominatorHigh, 0, sum.high);
    put(line + kDenominatorLow, 0, sum.low);
}

}  // namespace nearkv
