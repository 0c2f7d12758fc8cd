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

std::uint8_t* reserve_piece() {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* bytes = mmap(nullptr, kPieceBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (bytes == MAP_FAILED) {
        std::perror("nearkv store: cannot reserve 1 GiB of address space (see ulimit -v)");
        std::abort();
    }
    return static_cast<std::uint8_t*>(bytes);
}

std::size_t offset_in_piece(std::uint64_t line) { return (line & (kPieceLines - 1)) * kLineBytes; }

}  // namespace

Store::~Store() {
    for (const Piece& piece : pieces_) munmap(piece.bytes, kPieceBytes);
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
    auto piece = find(line);
    if (piece == pieces_.end() || piece->index != line >> kPieceShift) {
        piece = pieces_.insert(piece, {line >> kPieceShift, reserve_piece()});
    }
    std::uint8_t* bytes = piece->bytes + offset_in_piece(line);
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
