// Which rows a job reads, and which of its query rows sees which of them (docs/numerics.md, section 10).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention_abi.h"

namespace nearkv {

// Rows of a job's runs; without a list there is one run, its row range.
inline std::int64_t rows_of(const Job& job) {
    if (!job.runs) return job.row_end - job.row_begin;
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < job.run_count; i++) rows += job.runs[2 * i + 1] - job.runs[2 * i];
    return rows;
}

// The numbers in the context of a part of a job's rows, one after the other.
class RowNumbers {
public:
    // The rows that are `begin` to `end` of all rows of the runs.
    RowNumbers(const Job& job, std::int64_t begin, std::int64_t end) : job_(job), left_(end - begin) {
        for (at_ = begin_of(0) + begin; left_ && at_ >= end_of(run_); run_++) at_ += begin_of(run_ + 1) - end_of(run_);
    }

    // Up to `most` of them; how many there were.
    std::size_t take(std::int64_t* numbers, std::size_t most) {
        std::size_t taken = 0;
        for (; taken < most && left_; taken++, left_--) {
            if (at_ == end_of(run_)) at_ = begin_of(++run_);
            numbers[taken] = at_++;
        }
        return taken;
    }

private:
    std::int64_t begin_of(std::int64_t run) const {
        return job_.runs ? (run < job_.run_count ? job_.runs[2 * run] : 0) : job_.row_begin;
    }
    std::int64_t end_of(std::int64_t run) const { return job_.runs ? job_.runs[2 * run + 1] : job_.row_end; }

    const Job& job_;
    std::int64_t left_;
    std::int64_t run_ = 0;
    std::int64_t at_ = 0;
};

// Positions, and who sees what.
class Seen {
public:
    explicit Seen(const Job& job) : job_(job) {}

    // Whether every query row sees all rows of the runs.
    bool all() const { return !job_.causal && !job_.tree; }

    std::int64_t query_position(std::size_t row) const { return job_.positions[row]; }

    std::int64_t position(std::int64_t row) const {
        return job_.tree && row >= job_.own_rows ? job_.positions[row - job_.own_rows] : row;
    }

    // A bit for each of some rows that a query row sees.
    std::uint32_t mask(std::size_t query_row, const std::int64_t* rows, std::size_t count) const {
        std::uint32_t bits = 0;
        for (std::size_t i = 0; i < count; i++) bits |= std::uint32_t{sees(query_row, rows[i])} << i;
        return bits;
    }

private:
    bool sees(std::size_t query_row, std::int64_t row) const {
        if (job_.tree && row >= job_.own_rows) {
            const auto own = static_cast<std::size_t>(row - job_.own_rows);
            if (!(job_.tree[query_row * kTreeRowBytes + own / 8] >> own % 8 & 1)) return false;
        }
        if (!job_.causal) return true;
        const std::int64_t distance = position(row) - job_.positions[query_row];
        return distance <= 0 && (!job_.window || distance > -job_.window || row < job_.kept);
    }

    const Job& job_;
};

}  // namespace nearkv
