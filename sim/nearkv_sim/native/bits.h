// Fields of packed vectors, which Verilator keeps as arrays of 32-bit words, lowest first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nearkv {

// A field of at most 64 bits.
struct Field {
    unsigned offset;
    unsigned width;
};

constexpr std::uint64_t low_bits(unsigned width) {
    return width < 64 ? (std::uint64_t{1} << width) - 1 : ~std::uint64_t{0};
}

// Sets a field; its bits must be zero before.
inline void insert(std::uint32_t* words, Field field, std::uint64_t value) {
    value &= low_bits(field.width);
    const unsigned shift = field.offset % 32;
    std::uint32_t* word = words + field.offset / 32;
    word[0] |= static_cast<std::uint32_t>(value << shift);
    if (shift + field.width > 32) word[1] |= static_cast<std::uint32_t>(value >> (32 - shift));
    if (shift + field.width > 64) word[2] |= static_cast<std::uint32_t>(value >> (64 - shift));
}

inline std::uint64_t extract(const std::uint32_t* words, Field field) {
    const unsigned shift = field.offset % 32;
    const std::uint32_t* word = words + field.offset / 32;
    std::uint64_t value = word[0] >> shift;
    if (shift + field.width > 32) value |= std::uint64_t{word[1]} << (32 - shift);
    if (shift + field.width > 64) value |= std::uint64_t{word[2]} << (64 - shift);
    return value & low_bits(field.width);
}

// Puts `count` words at bit `offset`; the bits there must be zero before. Nothing is written beyond them.
inline void insert_words(std::uint32_t* words, unsigned offset, const std::uint32_t* source, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) insert(words, {offset + 32 * static_cast<unsigned>(i), 32}, source[i]);
}

inline void extract_words(const std::uint32_t* words, unsigned offset, std::uint32_t* target, std::size_t count) {
    for (std::size_t i = 0; i < count; i++) {
        target[i] = static_cast<std::uint32_t>(extract(words, {offset + 32 * static_cast<unsigned>(i), 32}));
    }
}

}  // namespace nearkv
