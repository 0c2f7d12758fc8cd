// The DRAM of one sub-channel: checks every command against every rule of its part, and keeps the data.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "events.h"
#include "failure.h"
#include "store.h"

namespace nearkv {

// A part's rules: times in cycles of the command clock (tCK), counts, and places on the command bus. The names are
// those of `DramPart.rules` in nearkv_hw/abi/dram.py, which says what each is.
struct DramRules {
    // From "NAME=value NAME=value ..."; ends the process where a name is unknown or missing.
    explicit DramRules(std::string_view text);

    std::int64_t rcd, rcd_wr, rp, rp_ab, ras, rc, rtp, wr, cl, cwl, bl;
    std::int64_t ccd_s, ccd_l, ccd_l_wr, rrd_s, rrd_l, faw, wtr_s, wtr_l, rtw, ppd;
    std::int64_t refi, refi_set, ref_act, ref_ref, rfc, rfc_set, postponed;
    std::array<std::int64_t, 2> column, precharge, activate;  // first tCK on the bus, in even and odd frames
    std::int64_t column_takes, activate_second, activate_late, second_burst, burst_commands, separate_buses;
    std::int64_t tck_per_cycle, bank_groups, banks, rows, row_lines, sets, set_high, per_bank;
};

// One sub-channel. Commands come with the device cycle in which they are told and whether the frame is an odd one. The
// first command that breaks a rule goes to the device's failure, or to standard error where it has none; the commands
// after it are carried out unchecked.
class Dram {
public:
    Dram(unsigned channel, unsigned subchannel, std::string part, std::string_view rules);
    Dram(const Dram&) = delete;
    Dram& operator=(const Dram&) = delete;
    ~Dram();

    // Cycles start anew with closed banks; lines stay.
    void reset();
    // A late one is later than in its place by `activate_late`.
    void activate(std::int64_t cycle, bool odd, bool late, unsigned bank, unsigned row);
    void precharge(std::int64_t cycle, bool odd, bool all, unsigned bank);
    void refresh(std::int64_t cycle, bool odd, bool all, unsigned set);
    // The line waits until it is taken; reads are taken in their order.
    void read(std::int64_t cycle, bool odd, unsigned bank, unsigned column);
    void write(std::int64_t cycle, bool odd, unsigned bank, unsigned column, const void* data, std::uint64_t check,
               bool poison);

    struct Line {
        std::array<std::uint32_t, kLineBytes / 4> data;
        std::uint64_t check;
        bool poison;
    };
    // The line of the oldest read not yet taken.
    const Line& take();

    // Inverts a bit of a stored line: 0 to 511 its data, 512 to 575 its check bits. False where there is no such place.
    bool flip(unsigned bank, unsigned row, unsigned column, unsigned bit);

    // What was broken first; empty while nothing is.
    const std::string& violation() const { return violation_; }
    // Whether the simulator itself has to stop, for nobody else will.
    bool must_stop() const { return !violation_.empty() && !failure_; }
    bool is(const Events* device, unsigned channel, unsigned subchannel) const {
        return device == events_ && channel == channel_ && subchannel == subchannel_;
    }

private:
    // A command of the past.
    struct Mark {
        std::int64_t tck;
        const char* command;
        int bank;  // -1: all of them
    };
    static constexpr Mark kNever{-(std::int64_t{1} << 40), "", 0};

    struct Bank {
        std::int64_t row = -1;  // -1: closed
        Mark activated = kNever;
        Mark precharged = kNever;
        Mark read = kNever;   // the last burst
        Mark wrote = kNever;  // the last burst
        Mark refreshed = kNever;
        std::int64_t precharge_time = 0;
        std::int64_t refresh_time = 0;
    };
    // The last line that was read from, or written to, a bank group: when its first burst's command acted.
    struct Group {
        Mark activated = kNever;
        Mark read = kNever;
        Mark wrote = kNever;
    };

    unsigned group_of(unsigned bank) const { return bank % static_cast<unsigned>(rules_.bank_groups); }
    unsigned set_of(unsigned bank) const {
        return rules_.set_high ? bank / static_cast<unsigned>(rules_.bank_groups)
                               : bank % static_cast<unsigned>(rules_.sets);
    }
    std::uint64_t index(unsigned bank, std::uint64_t row, unsigned column) const {
        const auto banks = static_cast<std::uint64_t>(rules_.banks);
        return (row * banks + bank) * static_cast<std::uint64_t>(rules_.row_lines) + column;
    }

    // The row in which a column command of a line finds its column.
    std::uint64_t column_command(bool write, std::int64_t cycle, bool odd, unsigned bank, unsigned column);
    void check_group(bool same, const Group& earlier, bool write, const Mark& now);
    void check_bursts(const char* rule, const Mark& earlier, const Mark& now, std::int64_t least,
                      std::int64_t earlier_data, std::int64_t now_data);
    void check_refreshed(const Mark& now);
    void take_bus(unsigned bus, std::int64_t tck, const Mark& now);
    void at_least(const char* rule, const Mark& earlier, const Mark& now, std::int64_t least);
    void violate(const char* rule, const Mark& now, const std::string& what);
    std::string describe(const Mark& mark) const;
    void record(EventKind kind, std::uint64_t a, std::uint64_t b) {
        if (events_) events_->record(source_, kind, a, b);
    }

    const unsigned channel_;
    const unsigned subchannel_;
    const std::string part_;
    const DramRules rules_;
    Events* const events_;
    Failure* const failure_;
    const std::uint32_t source_;
    std::string violation_;

    std::vector<Bank> banks_;
    std::vector<Group> groups_;
    Mark activated_ = kNever;
    Mark precharged_ = kNever;
    Mark set_refreshed_ = kNever;
    static constexpr unsigned kWindow = 4;
    std::array<Mark, kWindow> activates_;  // the last ones
    unsigned oldest_activate_ = 0;
    // By which tCK each set of banks must have been refreshed again, and the first of these times.
    std::vector<std::int64_t> refreshes_done_;
    std::int64_t refresh_due_ = 0;
    static constexpr std::size_t kBusTcks = 64;
    std::array<std::array<Mark, kBusTcks>, 2> bus_;

    Store store_;
    static constexpr std::size_t kMostReads = 128;  // more than there are cycles from a read to its line
    std::array<Line, kMostReads> reads_;
    std::size_t reads_begun_ = 0;
    std::size_t reads_taken_ = 0;
};

}  // namespace nearkv
