// Rows of one job, worked through in blocks: scores, weights and sums (docs/numerics.md, sections 3 to 5).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_abi.h"
#include "attention_decode.h"
#include "attention_partial.h"
#include "attention_seen.h"
#include "binned.h"
#include "elements.h"
#include "lanes.h"

namespace nearkv {

constexpr std::size_t kBlockRows = 32;  // as many as bits of a mask
// Blocks are filled up with rows of zeros to a multiple of this.
constexpr std::size_t kRowStep = 8;
// Query heads that share what is loaded of a row.
constexpr std::size_t kTileQueries = 4;
constexpr std::int64_t kNoTop = std::numeric_limits<std::int64_t>::min();
// The score of a row without weight.
constexpr std::int64_t kNoScore = std::numeric_limits<std::int64_t>::min();

// Adds rows to partial results. Needs `RoundTowardZero`.
class RowWorker {
public:
    // `image` is the device's memory; `into` must outlive the worker.
    RowWorker(const std::uint8_t* image, const Job& job, Partial& into);

    // Adds rows of the job's runs, numbered from their first on.
    void add(std::int64_t begin, std::int64_t end);

private:
    struct Query {
        const std::uint8_t* codes;
        std::size_t row;  // its query row
        const Box<Doubles>* values;
        double peak;
        bool special;
        // The lowest top bin of the lanes, if all have one: terms below its end change no top.
        std::int64_t lowest_top = kNoTop;
    };
    struct Row {
        const std::uint8_t* k;
        const std::uint8_t* k_scales;
        const std::uint8_t* v;
        const std::uint8_t* v_scales;
        bool k_special;
        bool v_special;
    };
    // Weights of a query's rows in a block, as doubles in units of 2^(32 * base).
    struct Weights {
        alignas(64) std::array<double, kBlockRows> value;
        std::int64_t base;
        bool settled;
    };
    enum class Fate { kNan, kDropped, kUp, kDown };

    Row find_row(std::int64_t row) const;
    void load_block();
    void load_latent(std::size_t row);
    bool seen_by(std::size_t first, std::size_t queries) const;
    void prefetch_next(std::size_t rows);
    void prefetch(const Row& row) const;
    template <std::size_t Queries>
    void work_tile(std::size_t first);
    template <std::size_t Queries>
    void dot_products(std::size_t first);
    template <std::size_t Queries, bool Narrow>
    void add_values(std::size_t first);
    void find_scores(std::size_t query, const double* dots);
    void change_scores(std::size_t query);
    void find_certain_scores(const Query& query, const double* dots, std::uint64_t* certain);
    std::int64_t exact_score(const Query& query, std::size_t row) const;
    Fate fate_of(const Query& query, const Row& row) const;
    void find_weights(std::size_t query, Weights& weights);
    void add_weights(std::size_t query, Weights& weights);
    void add_row_exactly(std::size_t query, std::size_t row, bool with_denominator);
    void raise_tops(LaneSums& sums, const Weights& weights, const Box<Doubles>* values) const;
    void find_lowest_top(std::size_t query);

    const std::uint8_t* image_;
    const Job& job_;
    Partial& into_;
    Seen seen_;
    Decoder q_decoder_;
    Decoder k_decoder_;
    Decoder v_decoder_;
    std::size_t k_blocks_;  // of kLanes elements
    std::size_t v_blocks_;
    Number factor_;
    std::vector<Box<Doubles>> q_;  // [group][k_blocks]
    std::vector<Box<Doubles>> k_;  // [rows][k_blocks]
    std::vector<Box<Doubles>> v_;  // [v_blocks][rows]
    std::vector<Query> queries_;

    std::array<std::int64_t, kBlockRows> numbers_;       // of the block's rows in the context
    std::array<std::int64_t, kBlockRows> next_numbers_;  // of the next block's rows
    std::size_t next_ = 0;  // these from here on, up to next_end_, are not asked for yet
    std::size_t next_end_ = 0;
    std::vector<std::uint32_t> visible_;  // a bit for each row of the block, by query row
    std::size_t rows_ = 0;
    std::size_t padded_rows_ = 0;
    std::uint32_t k_specials_ = 0;  // a bit for each row whose K is special
    std::array<Row, kBlockRows> row_;
    alignas(64) std::array<double, kBlockRows> k_peak_;
    std::array<double, kBlockRows> v_peak_;
    alignas(64) std::array<std::int64_t, kBlockRows> score_;
    alignas(64) std::array<std::array<double, kBlockRows>, kTileQueries> dot_;
    std::array<Weights, kTileQueries> weights_;
};

}  // namespace nearkv
