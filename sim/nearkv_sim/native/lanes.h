// A register's float64 lanes as one value, and the split of terms into the limbs of binned sums.
//
// Everything here runs with rounding toward zero. Vectors are the compiler's own extension, as wide as the registers.
#pragma once

#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors pass between functions of one library only

namespace nearkv {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVectorBytes = 32;
#else
constexpr std::size_t kVectorBytes = 16;
#endif
constexpr std::size_t kLanes = kVectorBytes / sizeof(double);
using Doubles = double __attribute__((vector_size(kVectorBytes)));
using Words = std::uint64_t __attribute__((vector_size(kVectorBytes)));
using Integers = std::int64_t __attribute__((vector_size(kVectorBytes)));

constexpr std::uint64_t kSignBit = std::uint64_t{1} << 63;
constexpr int kDoubleBias = 1023;
constexpr int kDoubleFractionBits = 52;

// A vector as an element of a container.
template <typename Vector>
struct Box {
    Vector value{};
};

inline Words words(Doubles x) { return reinterpret_cast<Words>(x); }
inline Doubles doubles(Words x) { return reinterpret_cast<Doubles>(x); }
inline Integers integers(Words x) { return reinterpret_cast<Integers>(x); }
inline Doubles magnitude(Doubles x) { return doubles(words(x) & ~kSignBit); }
// All ones where x is negative.
inline Words sign_mask(Doubles x) { return reinterpret_cast<Words>(reinterpret_cast<Integers>(x) >> 63); }

template <typename Vector, typename Element>
Vector load(const Element* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

template <typename Vector, typename Element>
void store(Element* to, const Vector& x) {
    std::memcpy(to, &x, sizeof x);
}

// 16-bit elements, one to a lane, extended by their signs.
inline Words extended(const std::uint8_t* elements) {
#ifdef __AVX512F__  // GCC converts one by one otherwise
    return reinterpret_cast<Words>(_mm512_maskz_cvtepi16_epi64(0xFF, load<__m128i>(elements)));
#else
    using Codes = std::int16_t __attribute__((vector_size(2 * kLanes)));
    return reinterpret_cast<Words>(__builtin_convertvector(load<Codes>(elements), Integers));
#endif
}

// 2^exponent, within a double's normal range.
inline double power_of_two(std::int64_t exponent) {
    return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + kDoubleBias) << kDoubleFractionBits);
}

// floor(log2(x)) of a positive normal double; far below every exponent for zero.
inline std::int64_t exponent_of(double x) {
    return static_cast<std::int64_t>(std::bit_cast<std::uint64_t>(x) >> kDoubleFractionBits) - kDoubleBias;
}

// Rounding toward zero, and subnormals kept, while it lives: float64 is exact only so.
class RoundTowardZero {
public:
    RoundTowardZero() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
        std::fesetround(FE_TOWARDZERO);
    }
    RoundTowardZero(const RoundTowardZero&) = delete;
    RoundTowardZero& operator=(const RoundTowardZero&) = delete;
    ~RoundTowardZero() { std::fesetenv(&before_); }

private:
    std::fenv_t before_;
};

// The two grids of sums' top bins. What is added to 2^52 grid steps keeps, rounded toward zero, its whole steps in
// the low bits of the double.
struct Grid {
    Grid() = default;
    // Of bins that are at most kDoubleBias / 32 - 2 from zero.
    explicit Grid(Integers bin)
        : high(doubles(reinterpret_cast<Words>((bin * 32 + kDoubleBias + kDoubleFractionBits) << kDoubleFractionBits))),
          low(doubles(words(high) - (std::uint64_t{32} << kDoubleFractionBits))) {}

    Doubles high;
    Doubles low;
};

// Limbs of sums. A term leaves what lies in its grid's double below it in the sum, too; `Grid` takes it out.
struct Limbs {
    Words high{};
    Words low{};

    // Adds terms of magnitude `element` * `weight`, whose product is exact and below the top bin's end. `sign` is all
    // ones where a term is negative.
    [[gnu::always_inline]] void add(const Grid& grid, Doubles element, Words sign, double weight) {
        const Doubles upper = grid.high + element * weight;
        const Doubles rest = element * weight - (upper - grid.high);
        high += words(upper) ^ sign;
        low += words(grid.low + rest) ^ sign;
    }

    // Takes out what the grid left, of `rows` terms of which `negatives` were negative (or -0).
    void settle(const Grid& grid, std::uint64_t rows, Words negatives) {
        const Words times = rows - 2 * negatives;
        high += negatives - words(grid.high) * times;
        low += negatives - words(grid.low) * times;
    }

    // `add` for terms that are below 2^52 steps of the low grid: both limbs lie in one double then.
    [[gnu::always_inline]] void add_narrow(const Grid& grid, Doubles element, Words sign, double weight) {
        const Words both = words(grid.low + element * weight) ^ sign;
        high += both >> 32;
        low += both;
    }

    // `settle` after `add_narrow`.
    void settle_narrow(const Grid& grid, std::uint64_t rows, Words negatives) {
        const Words times = rows - 2 * negatives;
        high -= (words(grid.low) >> 32) * times + negatives * 0xFFFFFFFF;
        low += negatives - words(grid.low) * times - (high << 32);
    }
};

}  // namespace nearkv
