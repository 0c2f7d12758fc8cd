// The partial results of a job's query heads, and how they become lines of memory (docs/numerics.md, sections 5 and 6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_abi.h"
#include "binned.h"
#include "lanes.h"

namespace nearkv {

// Sums of a register's lanes.
struct LaneSums {
    Integers top = Integers{} + kTopNone;
    Words high{};
    Words low{};

    Sum at(std::size_t lane) const {
        return {top[lane], static_cast<std::int64_t>(high[lane]), static_cast<std::int64_t>(low[lane])};
    }
    void set(std::size_t lane, const Sum& sum) {
        top[lane] = sum.top;
        high[lane] = static_cast<std::uint64_t>(sum.high);
        low[lane] = static_cast<std::uint64_t>(sum.low);
    }
    // Sees every sum from a top bin that is not below its own.
    void lower(Integers larger) {
        const Integers distance = larger - top;
        low = distance == 0 ? low : distance == 1 ? high : Words{};
        high = distance == 0 ? high : Words{};
        top = larger;
    }
};

class Partial {
public:
    explicit Partial(const Job& job)
        : lanes_(static_cast<std::size_t>(job.value_dim)),
          blocks_((lanes_ + kLanes - 1) / kLanes),
          group_(static_cast<std::size_t>(job.group)),
          queries_(group_ * static_cast<std::size_t>(job.query_rows)),
          denominators_(queries_),
          nan_(queries_),
          numerators_(queries_ * blocks_),
          flags_(queries_ * lanes_) {}

    std::size_t lanes() const { return lanes_; }
    std::size_t queries() const { return queries_; }
    Sum& denominator(std::size_t query) { return denominators_[query]; }
    // Where set, nothing else of the query has a meaning.
    bool nan(std::size_t query) const { return nan_[query] != 0; }
    void set_nan(std::size_t query) { nan_[query] = 1; }
    // Lanes of a query, a register after the other.
    LaneSums* numerators(std::size_t query) { return &numerators_[query * blocks_]; }
    // A bit of kLane* for each special value that a lane has met.
    std::uint8_t& flags(std::size_t query, std::size_t lane) { return flags_[query * lanes_ + lane]; }

    void add(std::size_t query, std::size_t lane, const Number& term) {
        LaneSums& sums = numerators(query)[lane / kLanes];
        Sum sum = sums.at(lane % kLanes);
        sum.add(term);
        sums.set(lane % kLanes, sum);
    }

    void merge(const Partial& other);
    // Adds the sink of each query head to all of its queries, by its float32 bits.
    void add_sinks(const std::uint32_t* sinks);
    // Writes every query head's result to where the job wants it, whole lines, padding included. Sums of a NaN query,
    // which have no meaning, are written as empty.
    void write(const Job& job);

private:
    void forget(std::size_t query);
    void write_states(const Job& job, std::uint8_t* out, std::size_t query);
    void write_codes(const Job& job, std::uint8_t* out, std::size_t query);
    void write_denominator(std::uint8_t* line, std::size_t query);

    std::size_t lanes_;
    std::size_t blocks_;
    std::size_t group_;
    std::size_t queries_;  // heads of all query rows
    std::vector<Sum> denominators_;
    std::vector<std::uint8_t> nan_;
    std::vector<LaneSums> numerators_;
    std::vector<std::uint8_t> flags_;
};

}  // namespace nearkv
