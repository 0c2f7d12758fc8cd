// The data behind one memory channel: 64-byte lines, stored only where something was written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace nearkv {

constexpr std::size_t kLineBytes = 64;

// Lines of zeros until written. Addresses have 64 bits; memory is reserved in large pieces as lines of them are
// written, and the operating system backs only the pages that were touched.
class Store {
public:
    Store() = default;
    Store(const Store&) = delete;
    Store& operator=(const Store&) = delete;
    ~Store();

    // Copies a line to `data` (64 bytes); returns whether it is poisoned.
    bool read(std::uint64_t line, void* data) const;

    // Writes the bytes of `data` whose bit in `mask` is set. A poisoned write marks the line; a clean write of all
    // bytes clears the mark; a clean write of some leaves it, for the rest is still lost.
    void write(std::uint64_t line, const void* data, std::uint64_t mask, bool poison);

    // 64 more bits beside a line, zero until written; kept only where some are.
    std::uint64_t read_check(std::uint64_t line) const;
    void write_check(std::uint64_t line, std::uint64_t check);

    // Inverts a bit of a line, 0 to 511.
    void flip(std::uint64_t line, unsigned bit);

private:
    struct Piece {
        std::uint64_t index;
        std::uint8_t* bytes;
        std::uint64_t* checks;  // null until one is written
    };

    std::vector<Piece>::const_iterator find(std::uint64_t line) const;
    Piece& piece_of(std::uint64_t line);
    std::vector<Piece> pieces_;  // sorted by index
    std::unordered_set<std::uint64_t> poisoned_;
};

}  // namespace nearkv
