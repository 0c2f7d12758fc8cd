#include "attention_decode.h"

#include <algorithm>
#include <cstring>

namespace nearkv {
namespace {

constexpr std::uint64_t kInfinityBits = std::uint64_t{0x7FF} << 52;

std::uint16_t code_of(const std::uint8_t* codes, std::size_t index) {
    std::uint16_t code;
    std::memcpy(&code, codes + index * sizeof code, sizeof code);
    return code;
}

std::vector<double> table(const Format& format) {
    std::vector<double> numbers(std::size_t{1} << format.bits);
    for (std::size_t code = 0; code < numbers.size(); code++) {
        numbers[code] = element_value(format, static_cast<unsigned>(code));
    }
    return numbers;
}

template <int Bits>
std::size_t narrow_code(const std::uint8_t* codes, std::size_t index) {
    if constexpr (Bits == 8) {
        return codes[index];
    } else {
        return codes[index / 2] >> 4 * (index % 2) & 0xF;
    }
}

// The numbers of a register's codes, out of a table of all codes.
template <int Bits>
Doubles numbers_of(const double* numbers, const std::uint8_t* codes, std::size_t index) {
#ifdef __AVX512F__
    if constexpr (Bits == 4) {  // the whole table is two registers, of which an index takes its low four bits
        std::uint32_t some;
        std::memcpy(&some, codes + index / 2, sizeof some);
        const __m512i which = _mm512_srlv_epi64(_mm512_set1_epi64(some), _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28));
        return reinterpret_cast<Doubles>(
            _mm512_permutex2var_pd(_mm512_loadu_pd(numbers), which, _mm512_loadu_pd(numbers + 8)));
    }
#endif
    Doubles some{};
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kLanes; i++) some[i] = numbers[narrow_code<Bits>(codes, index + i)];
    return some;
}

}  // namespace

Decoder::Decoder(const Format& format, std::size_t dim, const Format* scale, std::size_t block,
                 const std::uint16_t* codebook)
    : format_(format),
      dim_(dim),
      scale_(scale),
      block_(block ? block : dim),
      convert_(format.bits == 16 ? format : kFormats[0]),
      scale_convert_(scale && scale->bits == 16 ? *scale : kFormats[0]) {
    if (codebook) {
        numbers_.resize(kLutEntries);
        for (std::size_t i = 0; i < numbers_.size(); i++) numbers_[i] = element_value(kFormats[kLutFormat], codebook[i]);
    } else if (format.bits < 16) {
        numbers_ = table(format);
    }
    if (scale && scale->bits < 16) scales_ = table(*scale);
}

double Decoder::at(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t index) const {
    if (format_.bits == 16) return element_value(format_, code_of(codes, index));
    const double number =
        numbers_[format_.bits == 8 ? narrow_code<8>(codes, index) : narrow_code<4>(codes, index)];
    return scale_ ? number * scale_at(scales, index / block_) : number;
}

template <int Bits>
Decoded Decoder::decode_narrow(const std::uint8_t* codes, const std::uint8_t* scales, Box<Doubles>* to,
                               std::size_t stride) const {
    const double* numbers = numbers_.data();
    Integers peaks{};
    for (std::size_t first = 0; first < dim_; first += block_) {
        const std::size_t end = std::min(first + block_, dim_);
        const double scale = scale_ ? scale_at(scales, first / block_) : 1.0;
        // A block begins with a register, as blocks are of 16 elements or more.
        for (std::size_t lane = first; lane < end; lane += kLanes) {
            Doubles some{};
            if (lane + kLanes <= end) {
                some = numbers_of<Bits>(numbers, codes, lane) * scale;
            } else {
                for (std::size_t i = 0; lane + i < end; i++) {
                    some[i] = numbers[narrow_code<Bits>(codes, lane + i)] * scale;
                }
            }
            to[lane / kLanes * stride].value = some;
            const Integers size = integers(words(some) & ~kSignBit);
            peaks = size > peaks ? size : peaks;
        }
    }
    std::int64_t peak = 0;
    for (std::size_t i = 0; i < kLanes; i++) peak = std::max<std::int64_t>(peak, peaks[i]);
    const bool special = static_cast<std::uint64_t>(peak) >= kInfinityBits;
    if (special) {
        for (std::size_t block = 0; block < (dim_ + kLanes - 1) / kLanes; block++) {
            const Words bits = words(to[block * stride].value);
            const Integers none = integers(bits & ~kSignBit) >= static_cast<std::int64_t>(kInfinityBits);
            to[block * stride].value = doubles(bits & ~reinterpret_cast<Words>(none));
        }
        peak = 0;  // nothing that is worked in lanes meets this row
    }
    return {std::bit_cast<double>(peak), special};
}

double Decoder::scale_at(const std::uint8_t* scales, std::size_t index) const {
    if (scale_->bits < 16) return scales_[scales[index]];
    const std::uint16_t code = code_of(scales, index);
    const auto magnitude = static_cast<std::uint16_t>(code & kMagnitudeMask);
    if (magnitude >= scale_convert_.infinity) return element_value(*scale_, code);
    return code == magnitude ? scale_convert_(magnitude) : -scale_convert_(magnitude);
}

template Decoded Decoder::decode_narrow<4>(const std::uint8_t*, const std::uint8_t*, Box<Doubles>*, std::size_t) const;
template Decoded Decoder::decode_narrow<8>(const std::uint8_t*, const std::uint8_t*, Box<Doubles>*, std::size_t) const;

}  // namespace nearkv
