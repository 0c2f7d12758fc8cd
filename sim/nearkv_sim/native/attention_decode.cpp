#include "attention_decode.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace nearkv {
namespace {

using Magnitudes = std::int16_t __attribute__((vector_size(kVectorBytes)));
constexpr std::size_t kLineLanes = kLineBytes / 2;
constexpr std::uint64_t kInfinityBits = std::uint64_t{0x7FF} << 52;

// Elements as doubles; what stands for no number becomes some number.
Doubles decoded(const std::uint8_t* codes, const ToDouble& convert) {
    return doubles((extended(codes) << convert.shift) & convert.kept) * convert.scale;
}

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

}  // namespace

Decoder::Decoder(const Format& format, std::size_t dim, const Format* scale, std::size_t block,
                 const std::uint16_t* codebook)
    : format_(format), dim_(dim), scale_(scale), block_(block ? block : dim), convert_(format.bits == 16 ? format : kFormats[0]) {
    if (codebook) {
        numbers_.resize(kLutEntries);
        for (std::size_t i = 0; i < numbers_.size(); i++) numbers_[i] = element_value(kFormats[kLutFormat], codebook[i]);
    } else if (format.bits < 16) {
        numbers_ = table(format);
    }
    if (scale && scale->bits < 16) scales_ = table(*scale);
}

Decoded Decoder::decode(const std::uint8_t* codes, const std::uint8_t* scales, Box<Doubles>* to,
                        std::size_t stride) const {
    if (format_.bits == 16) return decode_wide(codes, to, stride);
    return format_.bits == 8 ? decode_narrow<8>(codes, scales, to, stride)
                             : decode_narrow<4>(codes, scales, to, stride);
}

double Decoder::at(const std::uint8_t* codes, const std::uint8_t* scales, std::size_t index) const {
    if (format_.bits == 16) return element_value(format_, code_of(codes, index));
    const double number =
        numbers_[format_.bits == 8 ? narrow_code<8>(codes, index) : narrow_code<4>(codes, index)];
    return scale_ ? number * scale_at(scales, index / block_) : number;
}

Decoded Decoder::decode_wide(const std::uint8_t* codes, Box<Doubles>* to, std::size_t stride) const {
    Magnitudes peaks{};
    const ToDouble convert = convert_;
    const auto add_line = [&](const std::uint8_t* line, std::size_t lanes) {
        for (std::size_t at = 0; at < kLineBytes; at += kVectorBytes) {
            const Magnitudes some = load<Magnitudes>(line + at) & static_cast<std::int16_t>(kMagnitudeMask);
            peaks = some > peaks ? some : peaks;
        }
#pragma GCC unroll 4
        for (std::size_t lane = 0; lane < lanes; lane += kLanes) {
            to->value = decoded(line + 2 * lane, convert);
            to += stride;
        }
    };
    for (std::size_t i = 0; i < dim_ / kLineLanes; i++) add_line(codes + i * kLineBytes, kLineLanes);
    if (const std::size_t rest = dim_ % kLineLanes) {
        std::array<std::uint8_t, kLineBytes> line{};
        std::memcpy(line.data(), codes + dim_ / kLineLanes * kLineBytes, 2 * rest);
        add_line(line.data(), rest);
    }
    std::int16_t peak = 0;
    for (std::size_t i = 0; i < kVectorBytes / 2; i++) peak = std::max(peak, peaks[i]);
    const auto code = static_cast<std::uint16_t>(peak);
    return {convert(code), code >= convert.infinity};
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
#pragma GCC unroll 8
                for (std::size_t i = 0; i < kLanes; i++) some[i] = numbers[narrow_code<Bits>(codes, lane + i)];
                some *= scale;
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
    return scale_->bits == 16 ? element_value(*scale_, code_of(scales, index)) : scales_[scales[index]];
}

}  // namespace nearkv
