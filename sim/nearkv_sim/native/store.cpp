#include "store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nearkv {
namespace {

constexpr unsigned kPieceShift = 24;  // lines of a piece, log2: pieces of 1 GiB
constexpr std::uint64_t kPieceLines = std::uint64_t{1} << kPieceShift;
constexpr std::size_t kPieceBytes = kPieceLines * kLineBytes;
constexpr std::size_t kCheckBytes = kPieceLines * sizeof(std::uint64_t);

void* reserve(std::size_t bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("nearkv store: cannot reserve address space for 1 GiB of memory (see ulimit -v)");
        std::abort();
    }
    return memory;
}

std::size_t line_in_piece(std::uint64_t line) { return line & (kPieceLines - 1); }
std::size_t offset_in_piece(std::uint64_t line) { return line_in_piece(line) * kLineBytes; }

}  // namespace

Store::~Store() {
    for (const Piece& piece : pieces_) {
        munmap(piece.bytes, kPieceBytes);
        if (piece.checks) munmap(piece.checks, kCheckBytes);
    }
}

bool Store::read(std::uint64_t line, void* data) const {
    const auto piece = find(line);
    if (piece != pieces_.end() && piece->index == line >> kPieceShift) {
        std::memcpy(data, piece->bytes + offset_in_piece(line), kLineBytes);
    } else {
        std::memset(data, 0, kLineBytes);
    }
    return !poisoned_.empty() && poisoned_.count(line) != 0;
}

void Store::write(std::uint64_t line, const void* data, std::uint64_t mask, bool poison) {
    std::uint8_t* bytes = piece_of(line).bytes + offset_in_piece(line);
    if (mask == ~std::uint64_t{0}) {
        std::memcpy(bytes, data, kLineBytes);
        if (!poison && !poisoned_.empty()) poisoned_.erase(line);
    } else {
        const auto* source = static_cast<const std::uint8_t*>(data);
        for (std::size_t i = 0; i < kLineBytes; i++) {
            if (mask >> i & 1) bytes[i] = source[i];
        }
    }
    if (poison) poisoned_.insert(line);
}

std::uint64_t Store::read_check(std::uint64_t line) const {
    const auto piece = find(line);
    if (piece == pieces_.end() || piece->index != line >> kPieceShift || !piece->checks) return 0;
    return piece->checks[line_in_piece(line)];
}

void Store::write_check(std::uint64_t line, std::uint64_t check) {
    Piece& piece = piece_of(line);
    if (!piece.checks) piece.checks = static_cast<std::uint64_t*>(reserve(kCheckBytes));
    piece.checks[line_in_piece(line)] = check;
}

void Store::flip(std::uint64_t line, unsigned bit) {
    std::uint8_t& byte = piece_of(line).bytes[offset_in_piece(line) + bit / 8];
    byte = static_cast<std::uint8_t>(byte ^ 1u << bit % 8);
}

// The piece that holds `line`, reserved if there is none.
Store::Piece& Store::piece_of(std::uint64_t line) {
    auto piece = find(line);
    if (piece == pieces_.end() || piece->index != line >> kPieceShift) {
        auto* const bytes = static_cast<std::uint8_t*>(reserve(kPieceBytes));
        piece = pieces_.insert(piece, {line >> kPieceShift, bytes, nullptr});
    }
    return pieces_[static_cast<std::size_t>(piece - pieces_.begin())];
}

// The piece that holds `line`, or where it would have to be inserted.
std::vector<Store::Piece>::const_iterator Store::find(std::uint64_t line) const {
    return std::lower_bound(pieces_.begin(), pieces_.end(), line >> kPieceShift,
                            [](const Piece& piece, std::uint64_t index) { return piece.index < index; });
}

}  // namespace nearkv

// What nearkv_store.sv imports. Verilator passes packed vectors as arrays of 32-bit words, lowest first.
extern "C" {

void* nearkv_store_open() { return new nearkv::Store; }

void nearkv_store_close(void* store) { delete static_cast<nearkv::Store*>(store); }

unsigned char nearkv_store_read(void* store, unsigned long long line, std::uint32_t* data) {
    return static_cast<const nearkv::Store*>(store)->read(line, data);
}

void nearkv_store_write(void* store, unsigned long long line, const std::uint32_t* data, unsigned long long mask,
                        unsigned char poison) {
    static_cast<nearkv::Store*>(store)->write(line, data, mask, poison != 0);
}
}
