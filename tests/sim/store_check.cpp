// Exercises store.cpp against a plain map; built with the sanitizers by test_store.py. Exits non-zero on a difference.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#include "store.h"

namespace {

using Line = std::array<std::uint8_t, nearkv::kLineBytes>;

struct Expected {
    Line data{};
    bool poison = false;
    std::uint64_t check = 0;
};

bool same(const nearkv::Store& store, std::uint64_t line, const Expected& expected) {
    Line data;
    data.fill(0xa5);
    const bool poison = store.read(line, data.data());
    return poison == expected.poison && data == expected.data && store.read_check(line) == expected.check;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
    nearkv::Store store, other;
    std::map<std::uint64_t, Expected> expected;
    constexpr std::uint64_t kPiece = std::uint64_t{1} << 24;
    for (int step = 0; step < 200000; step++) {
        // Lines beside every border that matters: of pieces, of pages, of the 34 bits, of the 58 bits.
        constexpr std::array<std::uint64_t, 6> kBases = {0, kPiece - 4, 5 * kPiece - 4, (1ull << 34) - 4, 1ull << 57, 60};
        const std::uint64_t line = kBases[random() % kBases.size()] + random() % 8;
        if (random() % 8 == 0) {
            const auto bit = static_cast<unsigned>(random() % 512);
            store.flip(line, bit);
            std::uint8_t& byte = expected[line].data[bit / 8];
            byte = static_cast<std::uint8_t>(byte ^ 1 << bit % 8);
        } else if (random() % 8 == 0) {
            store.write_check(line, expected[line].check = random());
        } else if (random() % 2) {
            Line data;
            for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
            const std::uint64_t mask = random() % 2 ? ~std::uint64_t{0} : random();
            const bool poison = random() % 8 == 0;
            store.write(line, data.data(), mask, poison);
            Expected& entry = expected[line];
            for (std::size_t i = 0; i < data.size(); i++) {
                if (mask >> i & 1) entry.data[i] = data[i];
            }
            entry.poison = poison || (entry.poison && mask != ~std::uint64_t{0});
        } else if (!same(store, line, expected[line])) {
            std::printf("line %#llx differs at step %d\n", static_cast<unsigned long long>(line), step);
            return 1;
        }
    }
    for (const auto& [line, entry] : expected) {
        if (!same(other, line, Expected{})) return 1;  // stores share nothing
    }
    return 0;
}
