#include "attention_rows.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace nearkv {
namespace {

// Weights so many bins of exponent below a block's largest are added exactly: a double's exponents end somewhere.
constexpr std::int64_t kFarExponent = 512;
constexpr std::int64_t kLowestBin = -24;
constexpr std::int64_t kHighestBin = 8;
// Scores are certain only far from where they saturate.
constexpr double kScoreRange = 0x1p42;
// Rounding errors, in units of what is rounded: 2^-52 each, and room to spare.
constexpr double kError = 0x1p-50;
constexpr double kFloor = 0x1.8p52;

std::int64_t bin_of(double x) { return exponent_of(x) >> kBinShift; }

double largest(Doubles x) {
    double most = 0;
    for (std::size_t i = 0; i < kLanes; i++) most = std::max(most, x[i]);
    return most;
}

std::int64_t total(Words x) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < kLanes; i++) sum += x[i];
    return static_cast<std::int64_t>(sum);
}

// The sums over the lanes of four values.
void store_totals(const Doubles (&x)[4], double* to) {
#if defined(__AVX512F__) && __has_builtin(__builtin_shufflevector)
    const Doubles a = __builtin_shufflevector(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
                      __builtin_shufflevector(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
    const Doubles b = __builtin_shufflevector(x[2], x[3], 0, 8, 2, 10, 4, 12, 6, 14) +
                      __builtin_shufflevector(x[2], x[3], 1, 9, 3, 11, 5, 13, 7, 15);
    const Doubles c = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                      __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    for (std::size_t i = 0; i < 4; i++) to[i] = c[i] + c[i + 4];
#else
    for (std::size_t i = 0; i < 4; i++) {
        to[i] = 0;
        for (std::size_t lane = 0; lane < kLanes; lane++) to[i] += x[i][lane];
    }
#endif
}

const Format* scale_format(std::int32_t code) { return code ? &kScales[code - 1] : nullptr; }

Decoder k_decoder(const Job& job) {
    return {kFormats[job.k_format], static_cast<std::size_t>(job.head_dim), scale_format(job.k_scale),
            static_cast<std::size_t>(job.k_block), job.k_format == kLutCode ? job.codebooks : nullptr};
}

// Of rows whose V is part of K this is K's.
Decoder v_decoder(const Job& job) {
    if (job.latent) return k_decoder(job);
    return {kFormats[job.v_format], static_cast<std::size_t>(job.value_dim), scale_format(job.v_scale),
            static_cast<std::size_t>(job.v_block), job.v_format == kLutCode ? job.codebooks + kLutEntries : nullptr};
}

}  // namespace

RowWorker::RowWorker(const std::uint8_t* image, const Job& job, Partial& into)
    : image_(image),
      job_(job),
      into_(into),
      seen_(job),
      q_decoder_(kFormats[job.query_format], static_cast<std::size_t>(job.head_dim)),
      k_decoder_(k_decoder(job)),
      v_decoder_(v_decoder(job)),
      k_blocks_((static_cast<std::size_t>(job.head_dim) + kLanes - 1) / kLanes),
      v_blocks_((into.lanes() + kLanes - 1) / kLanes),
      factor_(float32_number(job.factor)),
      q_(into.queries() * k_blocks_),
      k_(kBlockRows * k_blocks_),
      v_(kBlockRows * v_blocks_),
      visible_(static_cast<std::size_t>(job.query_rows)) {
    const std::size_t bytes = (2 * static_cast<std::size_t>(job.head_dim) + kLineBytes - 1) / kLineBytes * kLineBytes;
    for (std::size_t query = 0; query < into.queries(); query++) {
        const std::uint8_t* codes = image + static_cast<std::size_t>(job.query_line) * kLineBytes + query * bytes;
        Box<Doubles>* values = &q_[query * k_blocks_];
        const Decoded decoded = q_decoder_.decode(codes, nullptr, values, 1);
        const std::size_t row = query / static_cast<std::size_t>(job.group);
        queries_.push_back({codes, row, values, decoded.peak, decoded.special});
    }
}

void RowWorker::add(std::int64_t begin, std::int64_t end) {
    RowNumbers numbers(job_, begin, end);
    next_end_ = numbers.take(next_numbers_.data(), kBlockRows);
    while (next_end_ > 0) {
        rows_ = next_end_;
        numbers_ = next_numbers_;
        load_block();
        next_ = 0;
        next_end_ = numbers.take(next_numbers_.data(), kBlockRows);
        std::size_t first = 0;
        for (; first + kTileQueries <= queries_.size(); first += kTileQueries) work_tile<kTileQueries>(first);
        switch (queries_.size() - first) {
            case 3: work_tile<3>(first); break;
            case 2: work_tile<2>(first); break;
            case 1: work_tile<1>(first); break;
            default: break;
        }
    }
}

[[gnu::always_inline]] inline RowWorker::Row RowWorker::find_row(std::int64_t row) const {
    const std::int64_t first_page = job_.row_begin >> job_.page_rows_log2;
    const std::uint64_t page = job_.entries[(row >> job_.page_rows_log2) - first_page] >> kEntryLineShift;
    const std::int64_t slot = row & ((std::int64_t{1} << job_.page_rows_log2) - 1);
    const std::uint8_t* base = image_ + page * kLineBytes;
    return {base + slot * job_.k_pitch,
            base + job_.k_scales_at + slot * job_.k_scale_pitch,
            base + job_.v_at + slot * job_.v_pitch,
            base + job_.v_scales_at + slot * job_.v_scale_pitch,
            false,
            false};
}

void RowWorker::load_block() {
    padded_rows_ = (rows_ + kRowStep - 1) / kRowStep * kRowStep;
    k_specials_ = 0;
    for (std::size_t i = 0; i < rows_; i++) {
        Row& its = row_[i] = find_row(numbers_[i]);
        const Decoded k = k_decoder_.decode(its.k, its.k_scales, &k_[i * k_blocks_], 1);
        k_peak_[i] = k.peak;
        its.k_special = k.special;
        k_specials_ |= std::uint32_t{k.special} << i;
        if (job_.latent) {
            load_latent(i);
            continue;
        }
        const Decoded v = v_decoder_.decode(its.v, its.v_scales, &v_[i], kBlockRows);
        v_peak_[i] = v.peak;
        its.v_special = v.special;
    }
    for (std::size_t i = rows_; i < padded_rows_; i++) {
        k_peak_[i] = v_peak_[i] = 0;
        for (std::size_t block = 0; block < k_blocks_; block++) k_[i * k_blocks_ + block] = {};
        for (std::size_t block = 0; block < v_blocks_; block++) v_[block * kBlockRows + i] = {};
    }
    if (!seen_.all()) {
        for (std::size_t row = 0; row < visible_.size(); row++) visible_[row] = seen_.mask(row, numbers_.data(), rows_);
    }
}

// V of a row is the first elements of its K.
void RowWorker::load_latent(std::size_t row) {
    for (std::size_t block = 0; block < v_blocks_; block++) v_[block * kBlockRows + row] = k_[row * k_blocks_ + block];
    Row& its = row_[row];
    its.v = its.k;
    its.v_scales = its.k_scales;
    its.v_special = its.k_special;
    v_peak_[row] = k_peak_[row];
}

// Whether any of so many queries sees a row of the block.
bool RowWorker::seen_by(std::size_t first, std::size_t queries) const {
    if (seen_.all()) return true;
    for (std::size_t query = first; query < first + queries; query++) {
        if (visible_[queries_[query].row]) return true;
    }
    return false;
}

// Asks the memory for a share of the next block's rows, a few at a time: so many lines at once would stand in line.
void RowWorker::prefetch_next(std::size_t rows) {
    for (; rows > 0 && next_ < next_end_; rows--) prefetch(find_row(next_numbers_[next_++]));
}

void RowWorker::prefetch(const Row& row) const {
    for (std::int32_t line = 0; line < job_.k_pitch; line += kLineBytes) __builtin_prefetch(row.k + line);
    for (std::int32_t line = 0; line < job_.v_pitch; line += kLineBytes) __builtin_prefetch(row.v + line);
}

template <std::size_t Queries>
void RowWorker::work_tile(std::size_t first) {
    if (!seen_by(first, Queries)) return;
    dot_products<Queries>(first);
    bool narrow = true;
    for (std::size_t tile = 0; tile < Queries; tile++) {
        const std::size_t query = first + tile;
        Weights& weights = weights_[tile];
        find_scores(query, dot_[tile].data());
        find_weights(query, weights);
        add_weights(query, weights);
        double peak = 0;
        for (std::size_t i = 0; i < rows_; i++) peak = std::max(peak, weights.value[i] * v_peak_[i]);
        const std::int64_t lowest = queries_[query].lowest_top;
        const std::int64_t exponent = exponent_of(peak) + kBinBits * weights.base;
        weights.settled = peak == 0 || (lowest != kNoTop && exponent < kBinBits * (lowest + 1));
        narrow &= peak == 0 || (lowest != kNoTop && exponent < kBinBits * (lowest - 1) + kDoubleFractionBits);
    }
    narrow ? add_values<Queries, true>(first) : add_values<Queries, false>(first);
    for (std::size_t query = first; query < first + Queries; query++) {
        if (!weights_[query - first].settled) find_lowest_top(query);
    }
}

// Dot products as doubles, rounded; `find_certain_scores` knows how much.
template <std::size_t Queries>
void RowWorker::dot_products(std::size_t first) {
    constexpr std::size_t kRows = 4;
    const Box<Doubles>* q[Queries];
    for (std::size_t tile = 0; tile < Queries; tile++) q[tile] = queries_[first + tile].values;
    for (std::size_t i = 0; i < padded_rows_; i += kRows) {
        const Box<Doubles>* k = &k_[i * k_blocks_];
        Doubles sums[Queries][kRows] = {};
        for (std::size_t block = 0; block < k_blocks_; block++) {
#pragma GCC unroll 4
            for (std::size_t row = 0; row < kRows; row++) {
                const Doubles key = k[row * k_blocks_ + block].value;
#pragma GCC unroll 4
                for (std::size_t tile = 0; tile < Queries; tile++) sums[tile][row] += q[tile][block].value * key;
            }
        }
        for (std::size_t tile = 0; tile < Queries; tile++) store_totals(sums[tile], &dot_[tile][i]);
    }
}

// The scores of a block's rows, kNoScore where a row has no weight.
void RowWorker::find_scores(std::size_t index, const double* dots) {
    const Query& query = queries_[index];
    std::fill(score_.begin(), score_.end(), kNoScore);
    if (into_.nan(index)) return;
    alignas(64) std::array<std::uint64_t, kBlockRows> certain{};
    find_certain_scores(query, dots, certain.data());
    const std::uint32_t rows = ~std::uint32_t{0} >> (kBlockRows - rows_);
    const std::uint32_t visible = seen_.all() ? rows : visible_[query.row];
    std::uint32_t open = (query.special ? rows : k_specials_) | ~visible;
    for (std::size_t i = 0; i < kBlockRows; i++) open |= std::uint32_t{certain[i] == 0} << i;
    for (open &= rows; open; open &= open - 1) {
        const auto i = static_cast<std::size_t>(std::countr_zero(open));
        if (!(visible >> i & 1)) {
            score_[i] = kNoScore;
        } else if (query.special || row_[i].k_special) {
            const Fate fate = fate_of(query, row_[i]);
            const bool bad = fate == Fate::kNan || (fate == Fate::kUp && !job_.softcap);
            if (bad) into_.set_nan(index);
            const bool number = job_.softcap && (fate == Fate::kUp || fate == Fate::kDown);
            score_[i] = !number ? kNoScore : fate == Fate::kUp ? kScoreLimit : -kScoreLimit;
        } else {
            score_[i] = exact_score(query, i);
        }
    }
    std::fill(score_.begin() + static_cast<std::ptrdiff_t>(rows_), score_.end(), kNoScore);
    if (into_.nan(index)) std::fill(score_.begin(), score_.end(), kNoScore);
    if (job_.softcap || job_.slopes) change_scores(index);
}

// Softcap and bias.
void RowWorker::change_scores(std::size_t index) {
    const Query& query = queries_[index];
    const Number cap = float32_number(job_.softcap);
    for (std::size_t i = 0; i < rows_; i++) {
        if (score_[i] == kNoScore) continue;
        if (job_.softcap) score_[i] = capped(score_[i], cap);
        if (!job_.slopes) continue;
        const Number slope = float32_number(job_.slopes[index % static_cast<std::size_t>(job_.group)]);
        const std::int64_t distance = seen_.position(numbers_[i]) - seen_.query_position(query.row);
        score_[i] = std::clamp<std::int64_t>(score_[i] + bias(slope, distance), -kScoreLimit, kScoreLimit);
    }
}

// The score is a step function of the dot product. Where both ends of what the dot product may be, by rounding here and
// truncation there, lie on one step, that is the score; elsewhere `certain` is zero.
void RowWorker::find_certain_scores(const Query& query, const double* dots, std::uint64_t* certain) {
    const auto terms = static_cast<double>(k_blocks_ * kLanes);
    const double rounding = terms * (terms + 8) * kError;
    const double factor =
        static_cast<double>(factor_.significand) * power_of_two(factor_.exponent + kScoreFractionBits);
    const std::uint64_t sign = factor_.negative ? kSignBit : 0;
    constexpr std::uint64_t kKept = ~std::uint64_t{0} << (kDoubleFractionBits + 1 - kDotKeptBits);
    constexpr std::int64_t kNoExponent = -300;  // below every product's, for zero
    for (std::size_t i = 0; i < padded_rows_; i += kLanes) {
        const Doubles dot = doubles(words(load<Doubles>(dots + i)) ^ sign);
        const Doubles peak = query.peak * load<Doubles>(&k_peak_[i]);  // no product is larger
        const Integers exponent = integers(words(peak) >> kDoubleFractionBits) - kDoubleBias;
        const Integers top = (exponent > kNoExponent ? exponent : Integers{} + kNoExponent) >> kBinShift;
        const Integers step = ((top - 1) * kBinBits + kDoubleBias) << kDoubleFractionBits;
        const Doubles grid = doubles(reinterpret_cast<Words>(step));
        const Doubles error = terms * grid + rounding * peak;
        const Doubles low = doubles(words(dot - error) & kKept) * factor;
        const Doubles high = doubles(words(dot + error) & kKept) * factor;
        const Doubles least = low - (magnitude(low) * kError + kError) + 0.5;
        const Doubles most = high + (magnitude(high) * kError + kError) + 0.5;
        const Words floor = words(least + kFloor);
        const Words same = reinterpret_cast<Words>(floor == words(most + kFloor));
        store(&score_[i], floor - std::bit_cast<std::uint64_t>(kFloor));
        store(certain + i, same & reinterpret_cast<Words>(magnitude(least) < kScoreRange));
    }
}

// The score of a row without special values: terms are exact doubles, and their limbs are summed as integers.
std::int64_t RowWorker::exact_score(const Query& query, std::size_t row) const {
    const Box<Doubles>* k = &k_[row * k_blocks_];
    Doubles peaks{};
    for (std::size_t block = 0; block < k_blocks_; block++) {
        const Doubles term = magnitude(query.values[block].value * k[block].value);
        peaks = term > peaks ? term : peaks;
    }
    const double peak = largest(peaks);
    if (peak == 0) return 0;
    const std::int64_t top = bin_of(peak);
    const Grid grid(Integers{} + top);
    Limbs limbs;
    Words negatives{};
    for (std::size_t block = 0; block < k_blocks_; block++) {
        const Doubles term = query.values[block].value * k[block].value;
        const Words sign = sign_mask(term);
        limbs.add(grid, magnitude(term), sign, 1.0);
        negatives -= sign;
    }
    limbs.settle(grid, k_blocks_, negatives);
    return score_of({top, total(limbs.high), total(limbs.low)}, factor_);
}

// What becomes of a row where q or k holds an infinity or NaN.
RowWorker::Fate RowWorker::fate_of(const Query& query, const Row& row) const {
    bool positive = false;
    bool negative = false;
    for (std::size_t i = 0; i < static_cast<std::size_t>(job_.head_dim); i++) {
        const double q = q_decoder_.at(query.codes, nullptr, i);
        const double k = k_decoder_.at(row.k, row.k_scales, i);
        if (std::isnan(q) || std::isnan(k)) return Fate::kNan;
        if (!std::isinf(q) && !std::isinf(k)) continue;
        if (q == 0 || k == 0) return Fate::kNan;
        const bool minus = (std::signbit(q) != std::signbit(k)) != factor_.negative;
        (minus ? negative : positive) = true;
    }
    if ((positive && negative) || factor_.significand == 0) return Fate::kNan;
    return positive ? Fate::kUp : Fate::kDown;
}

// Weights of the rows that the lanes can hold; the others are added here.
void RowWorker::find_weights(std::size_t query, Weights& weights) {
    std::int64_t most = kNoScore;
    for (std::size_t i = 0; i < kBlockRows; i++) most = std::max(most, score_[i]);
    weights.value.fill(0);
    weights.base = 0;
    if (most == kNoScore) return;
    weights.base = most >> (kScoreFractionBits + kBinShift);
    const std::int64_t least = kBinBits * weights.base - kFarExponent;
    bool exact = false;
    for (std::size_t i = 0; i < rows_; i++) {
        const Weight weight = weight_of(score_[i]);
        const bool far = weight.n < least;
        exact |= far || row_[i].v_special;
        const std::int64_t exponent = far ? 0 : weight.n - kBinBits * weights.base - kWeightFractionBits;
        weights.value[i] = far ? 0.0 : static_cast<double>(weight.p) * power_of_two(exponent);
    }
    if (!exact) return;
    for (std::size_t i = 0; i < rows_; i++) {
        if (score_[i] == kNoScore) continue;
        const bool far = weight_of(score_[i]).n < least;
        if (far || row_[i].v_special) add_row_exactly(query, i, far);
    }
}

// Adds one row's terms in integers, flags included; to the denominator only where asked for.
void RowWorker::add_row_exactly(std::size_t query, std::size_t row, bool with_denominator) {
    const Number weight = weight_of(score_[row]).number();
    if (with_denominator) into_.denominator(query).add(weight);
    for (std::size_t lane = 0; lane < into_.lanes(); lane++) {
        const double value = v_decoder_.at(row_[row].v, row_[row].v_scales, lane);
        if (std::isnan(value)) {
            into_.flags(query, lane) |= kLaneNan;
        } else if (std::isinf(value)) {
            into_.flags(query, lane) |=
                static_cast<std::uint8_t>(value < 0 ? kLaneNegativeInfinity : kLanePositiveInfinity);
        } else {
            const Number element = number_of(value);
            into_.add(query, lane,
                      {element.negative, element.significand * weight.significand, element.exponent + weight.exponent});
        }
    }
    find_lowest_top(query);
}

// Adds a block's weights to the denominator. Then rows with special values have none for the lanes.
void RowWorker::add_weights(std::size_t query, Weights& weights) {
    double peak = 0;
    for (std::size_t i = 0; i < padded_rows_; i++) peak = std::max(peak, weights.value[i]);
    if (peak == 0) return;
    const std::int64_t bin = bin_of(peak);
    const Grid grid(Integers{} + bin);
    Limbs limbs;
    for (std::size_t i = 0; i < padded_rows_; i += kLanes) {
        limbs.add(grid, load<Doubles>(&weights.value[i]), Words{}, 1.0);
    }
    limbs.settle(grid, padded_rows_ / kLanes, Words{});
    into_.denominator(query).merge({bin + weights.base, total(limbs.high), total(limbs.low)});
    for (std::size_t i = 0; i < rows_; i++) {
        if (row_[i].v_special) weights.value[i] = 0;
    }
}

// `Narrow` is for blocks that `Limbs::add_narrow` can take.
template <std::size_t Queries, bool Narrow>
void RowWorker::add_values(std::size_t first) {
    for (std::size_t block = 0; block < v_blocks_; block++) {
        const Box<Doubles>* values = &v_[block * kBlockRows];
        prefetch_next((kBlockRows + v_blocks_ - 1) / v_blocks_);
        Grid grid[Queries];
        Limbs limbs[Queries];
        const double* weight[Queries];
        for (std::size_t tile = 0; tile < Queries; tile++) {
            const Weights& weights = weights_[tile];
            LaneSums& sums = into_.numerators(first + tile)[block];
            if (!weights.settled) raise_tops(sums, weights, values);
            Integers bin = sums.top - weights.base;
            bin = bin < kLowestBin ? Integers{} + kLowestBin : bin;
            grid[tile] = Grid(bin > kHighestBin ? Integers{} + kHighestBin : bin);
            weight[tile] = weights.value.data();
        }
        Words negatives{};
        for (std::size_t i = 0; i < padded_rows_; i++) {
            const Doubles value = values[i].value;
            const Words sign = sign_mask(value);
            negatives -= sign;
            const Doubles element = magnitude(value);
#pragma GCC unroll 4
            for (std::size_t tile = 0; tile < Queries; tile++) {
                if constexpr (Narrow) {
                    limbs[tile].add_narrow(grid[tile], element, sign, weight[tile][i]);
                } else {
                    limbs[tile].add(grid[tile], element, sign, weight[tile][i]);
                }
            }
        }
        for (std::size_t tile = 0; tile < Queries; tile++) {
            if constexpr (Narrow) {
                limbs[tile].settle_narrow(grid[tile], padded_rows_, negatives);
            } else {
                limbs[tile].settle(grid[tile], padded_rows_, negatives);
            }
            LaneSums& sums = into_.numerators(first + tile)[block];
            sums.high += limbs[tile].high;
            sums.low += limbs[tile].low;
        }
    }
}

// Raises the sums' tops to what a block's terms need.
void RowWorker::raise_tops(LaneSums& sums, const Weights& weights, const Box<Doubles>* values) const {
    Doubles peak{};
    for (std::size_t i = 0; i < rows_; i++) {
        const Doubles term = magnitude(values[i].value) * weights.value[i];
        peak = term > peak ? term : peak;
    }
    const Integers exponent = integers(words(peak) >> kDoubleFractionBits) - kDoubleBias;
    const Integers top = (exponent >> kBinShift) + weights.base;
    const Integers raised = (peak > 0.0) & (top > sums.top) ? top : sums.top;
    sums.lower(raised);
}

void RowWorker::find_lowest_top(std::size_t query) {
    std::int64_t lowest = std::numeric_limits<std::int64_t>::max();
    for (std::size_t lane = 0; lane < into_.lanes(); lane++) {
        lowest = std::min(lowest, into_.numerators(query)[lane / kLanes].top[lane % kLanes]);
    }
    queries_[query].lowest_top = lowest == kTopNone ? kNoTop : lowest;
}

}  // namespace nearkv
