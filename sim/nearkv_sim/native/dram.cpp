#include "dram.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

namespace nearkv {
namespace {

constexpr unsigned kDataBits = 8 * kLineBytes;
constexpr unsigned kCheckBits = 64;
constexpr unsigned kColumnBus = 1;

[[noreturn]] void unusable(std::string_view what, std::string_view name) {
    const std::string message = std::string(what) + " " + std::string(name);
    std::fprintf(stderr, "nearkv dram: %s in the rules of the part\n", message.c_str());
    std::abort();
}

// Every sub-channel there is, for flips.
std::mutex all_mutex;
std::vector<Dram*> all;

}  // namespace

DramRules::DramRules(std::string_view text) {
    std::map<std::string_view, std::int64_t*> fields = {
        {"RCD", &rcd}, {"RCD_WR", &rcd_wr}, {"RP", &rp}, {"RP_AB", &rp_ab}, {"RAS", &ras}, {"RC", &rc}, {"RTP", &rtp},
        {"WR", &wr}, {"CL", &cl}, {"CWL", &cwl}, {"BL", &bl}, {"CCD_S", &ccd_s}, {"CCD_L", &ccd_l},
        {"CCD_L_WR", &ccd_l_wr}, {"RRD_S", &rrd_s}, {"RRD_L", &rrd_l}, {"FAW", &faw}, {"WTR_S", &wtr_s},
        {"WTR_L", &wtr_l}, {"RTW", &rtw}, {"PPD", &ppd}, {"REFI", &refi}, {"REFI_SET", &refi_set},
        {"REF_ACT", &ref_act}, {"REF_REF", &ref_ref}, {"RFC", &rfc}, {"RFC_SET", &rfc_set}, {"POSTPONED", &postponed},
        {"column_even", &column[0]}, {"column_odd", &column[1]}, {"precharge_even", &precharge[0]},
        {"precharge_odd", &precharge[1]}, {"activate_even", &activate[0]}, {"activate_odd", &activate[1]},
        {"column_takes", &column_takes}, {"activate_second", &activate_second}, {"activate_late", &activate_late},
        {"second_burst", &second_burst}, {"burst_commands", &burst_commands}, {"separate_buses", &separate_buses},
        {"tck_per_cycle", &tck_per_cycle}, {"bank_groups", &bank_groups}, {"banks", &banks}, {"rows", &rows},
        {"row_lines", &row_lines}, {"sets", &sets}, {"set_high", &set_high}, {"per_bank", &per_bank},
    };
    while (!text.empty()) {
        const std::string_view word = text.substr(0, text.find(' '));
        text.remove_prefix(std::min(word.size() + 1, text.size()));
        const std::string_view name = word.substr(0, word.find('='));
        const auto field = fields.find(name);
        if (field == fields.end()) unusable("unknown or repeated", name);
        const char* const value = word.data() + std::min(name.size() + 1, word.size());
        const char* const end = word.data() + word.size();
        const auto [rest, error] = std::from_chars(value, end, *field->second);
        if (error != std::errc{} || rest != end) unusable("no number for", name);
        fields.erase(field);
    }
    if (!fields.empty()) unusable("missing", fields.begin()->first);
}

Dram::Dram(unsigned channel, unsigned subchannel, std::string part, std::string_view rules)
    : channel_(channel),
      subchannel_(subchannel),
      part_(std::move(part)),
      rules_(rules),
      events_(Events::current()),
      failure_(Failure::current()),
      source_(events_ ? events_->source("dram." + std::to_string(channel) + "." + std::to_string(subchannel)) : 0) {
    reset();
    const std::lock_guard lock(all_mutex);
    all.push_back(this);
}

void Dram::reset() {
    banks_.assign(static_cast<std::size_t>(rules_.banks), {});
    groups_.assign(static_cast<std::size_t>(rules_.bank_groups), {});
    activated_ = precharged_ = set_refreshed_ = kNever;
    activates_.fill(kNever);
    refreshes_done_.assign(static_cast<std::size_t>(rules_.per_bank ? rules_.sets : 1), 0);
    refresh_due_ = (rules_.postponed + 1) * (rules_.per_bank ? rules_.refi_set * rules_.sets : rules_.refi);
    for (auto& bus : bus_) bus.fill(kNever);
    reads_begun_ = reads_taken_ = 0;
}

Dram::~Dram() {
    const std::lock_guard lock(all_mutex);
    all.erase(std::find(all.begin(), all.end(), this));
}

void Dram::activate(std::int64_t cycle, bool odd, bool late, unsigned bank, unsigned row) {
    record(EventKind::kActivate, bank, row);
    const std::int64_t first = cycle * rules_.tck_per_cycle + rules_.activate[odd] + (late ? rules_.activate_late : 0);
    const Mark now{first + rules_.activate_second, "ACT", static_cast<int>(bank)};
    take_bus(0, first, now);
    take_bus(0, now.tck, now);
    check_refreshed(now);
    Bank& opened = banks_[bank];
    Group& group = groups_[group_of(bank)];
    if (opened.row >= 0) violate("ACT of an open bank", now, "after " + describe(opened.activated));
    if (row >= rules_.rows) violate("row", now, "row " + std::to_string(row) + " of " + std::to_string(rules_.rows));
    at_least(opened.precharged.bank < 0 ? "RP_AB" : "RP", opened.precharged, now, opened.precharge_time);
    at_least("RC", opened.activated, now, rules_.rc);
    at_least("RFC", opened.refreshed, now, opened.refresh_time);
    at_least("REF_ACT", set_refreshed_, now, rules_.ref_act);
    at_least("RRD_L", group.activated, now, rules_.rrd_l);
    at_least("RRD_S", activated_, now, rules_.rrd_s);
    at_least("FAW", activates_[oldest_activate_], now, rules_.faw);
    opened.row = row;
    opened.activated = group.activated = activated_ = activates_[oldest_activate_] = now;
    oldest_activate_ = (oldest_activate_ + 1) % kWindow;
}

void Dram::precharge(std::int64_t cycle, bool odd, bool all_banks, unsigned bank) {
    record(all_banks ? EventKind::kPrechargeAll : EventKind::kPrecharge, bank, 0);
    const int which = all_banks ? -1 : static_cast<int>(bank);
    const Mark now{cycle * rules_.tck_per_cycle + rules_.precharge[odd], "PRE", which};
    take_bus(0, now.tck, now);
    check_refreshed(now);
    at_least("PPD", precharged_, now, rules_.ppd);
    precharged_ = now;
    const unsigned from = all_banks ? 0 : bank;
    const unsigned to = all_banks ? static_cast<unsigned>(rules_.banks) : bank + 1;
    for (unsigned i = from; i < to; i++) {
        Bank& closed = banks_[i];
        at_least("RFC", closed.refreshed, now, closed.refresh_time);
        if (closed.row >= 0) {
            at_least("RAS", closed.activated, now, rules_.ras);
            at_least("RTP", closed.read, now, rules_.rtp);
            at_least("WR", closed.wrote, now, rules_.cwl + rules_.bl + rules_.wr);
        }
        closed.row = -1;
        closed.precharged = now;
        closed.precharge_time = all_banks ? rules_.rp_ab : rules_.rp;
    }
}

void Dram::refresh(std::int64_t cycle, bool odd, bool all_banks, unsigned set) {
    record(all_banks ? EventKind::kRefresh : EventKind::kRefreshSet, set, 0);
    const char* const command = all_banks ? "REF" : "REF of a set";
    Mark now{cycle * rules_.tck_per_cycle + rules_.precharge[odd], command, -1};
    take_bus(0, now.tck, now);
    check_refreshed(now);
    if (!all_banks && !rules_.per_bank) violate("refresh mode", now, "the part is set to refresh all banks at once");
    if (set >= rules_.sets) {
        violate("set", now, "set " + std::to_string(set) + " of " + std::to_string(rules_.sets));
        return;
    }
    if (!all_banks) {
        at_least("REF_REF", set_refreshed_, now, rules_.ref_ref);
        if (activated_.bank >= 0 && set_of(static_cast<unsigned>(activated_.bank)) != set) {
            at_least("RRD_L", activated_, now, rules_.rrd_l);
        }
    }
    for (unsigned i = 0; i < banks_.size(); i++) {
        if (!all_banks && set_of(i) != set) continue;
        Bank& bank = banks_[i];
        now.bank = static_cast<int>(i);
        if (bank.row >= 0) violate("REF with an open bank", now, "after " + describe(bank.activated));
        at_least(bank.precharged.bank < 0 ? "RP_AB" : "RP", bank.precharged, now, bank.precharge_time);
        at_least("RC", bank.activated, now, rules_.rc);
        at_least("RFC", bank.refreshed, now, bank.refresh_time);
        bank.refreshed = now;
        bank.refresh_time = all_banks ? rules_.rfc : rules_.rfc_set;
    }
    if (!all_banks) set_refreshed_ = now;
    // A refresh ahead of its time counts, but only so many are remembered.
    const std::int64_t interval = rules_.per_bank ? rules_.refi_set * rules_.sets : rules_.refi;
    const std::int64_t most = now.tck / interval + rules_.postponed;
    for (std::size_t i = 0; i < refreshes_done_.size(); i++) {
        if (all_banks || i == set) refreshes_done_[i] = std::min(refreshes_done_[i] + 1, most);
    }
    const std::int64_t done = *std::min_element(refreshes_done_.begin(), refreshes_done_.end());
    refresh_due_ = (done + rules_.postponed + 1) * interval;
}

void Dram::read(std::int64_t cycle, bool odd, unsigned bank, unsigned column) {
    const std::uint64_t line = column_command(false, cycle, odd, bank, column);
    Line& read = reads_[reads_begun_++ % kMostReads];
    read.poison = store_.read(line, read.data.data());
    read.check = store_.read_check(line);
}

void Dram::write(std::int64_t cycle, bool odd, unsigned bank, unsigned column, const void* data, std::uint64_t check,
                 bool poison) {
    const std::uint64_t line = column_command(true, cycle, odd, bank, column);
    store_.write(line, data, ~std::uint64_t{0}, poison);
    store_.write_check(line, check);
}

const Dram::Line& Dram::take() { return reads_[reads_taken_++ % kMostReads]; }

bool Dram::flip(unsigned bank, unsigned row, unsigned column, unsigned bit) {
    if (bank >= rules_.banks || row >= rules_.rows || column >= rules_.row_lines) return false;
    if (bit >= kDataBits + kCheckBits) return false;
    const std::uint64_t line = index(bank, row, column);
    if (bit < kDataBits) {
        store_.flip(line, bit);
    } else {
        store_.write_check(line, store_.read_check(line) ^ std::uint64_t{1} << (bit - kDataBits));
    }
    return true;
}

std::uint64_t Dram::column_command(bool write, std::int64_t cycle, bool odd, unsigned bank, unsigned column) {
    record(write ? EventKind::kWrite : EventKind::kRead, bank, column);
    const std::int64_t first = cycle * rules_.tck_per_cycle + rules_.column[odd];
    const Mark now{first + rules_.column_takes - 1, write ? "WR" : "RD", static_cast<int>(bank)};
    Bank& opened = banks_[bank];
    if (violation_.empty()) {
        const unsigned bus = rules_.separate_buses ? kColumnBus : 0;
        for (std::int64_t burst = 0; burst < rules_.burst_commands; burst++) {
            for (std::int64_t tck = 0; tck < rules_.column_takes; tck++) {
                take_bus(bus, first + burst * rules_.second_burst + tck, now);
            }
        }
        check_refreshed(now);
        if (opened.row < 0) violate("column command to a closed bank", now, "last " + describe(opened.precharged));
        if (column >= rules_.row_lines) {
            violate("column", now, "column " + std::to_string(column) + " of " + std::to_string(rules_.row_lines));
        }
        at_least(write ? "RCD_WR" : "RCD", opened.activated, now, write ? rules_.rcd_wr : rules_.rcd);
        for (unsigned i = 0; i < groups_.size(); i++) check_group(i == group_of(bank), groups_[i], write, now);
    }
    Group& group = groups_[group_of(bank)];
    (write ? group.wrote : group.read) = now;
    Mark& last = write ? opened.wrote : opened.read;
    last = now;
    last.tck += rules_.second_burst;
    return index(bank, opened.row < 0 ? 0 : static_cast<std::uint64_t>(opened.row), column);
}

// The bursts of a line against those of the last lines of a bank group.
void Dram::check_group(bool same, const Group& earlier, bool write, const Mark& now) {
    const std::int64_t ccd = same ? rules_.ccd_l : rules_.ccd_s;
    const std::int64_t write_end = rules_.cwl + rules_.bl;
    if (write) {
        check_bursts(same ? "CCD_L_WR" : "CCD_S", earlier.wrote, now, same ? rules_.ccd_l_wr : ccd, rules_.cwl,
                     rules_.cwl);
        check_bursts("RTW", earlier.read, now, rules_.rtw, rules_.cl, rules_.cwl);
    } else {
        check_bursts(same ? "CCD_L" : "CCD_S", earlier.read, now, ccd, rules_.cl, rules_.cl);
        check_bursts(same ? "WTR_L" : "WTR_S", earlier.wrote, now, write_end + (same ? rules_.wtr_l : rules_.wtr_s),
                     rules_.cwl, rules_.cl);
    }
}

// Every burst of `now` is apart from every burst of `earlier`, before or after it, and no data meets on the data bus.
void Dram::check_bursts(const char* rule, const Mark& earlier, const Mark& now, std::int64_t least,
                        std::int64_t earlier_data, std::int64_t now_data) {
    const std::int64_t second = rules_.second_burst;
    const std::int64_t gap = now.tck - earlier.tck;
    if (gap - second >= least && gap - second + now_data - earlier_data >= rules_.bl) return;
    for (const std::int64_t ours : {std::int64_t{0}, second}) {
        for (const std::int64_t theirs : {std::int64_t{0}, second}) {
            Mark a = earlier, b = now;
            a.tck += theirs;
            b.tck += ours;
            if (a.tck > b.tck) std::swap(a, b);
            at_least(rule, a, b, least);
            if (std::abs(gap + ours + now_data - theirs - earlier_data) < rules_.bl) {
                violate("data bus", now, "its data meets that of " + describe(earlier));
            }
        }
    }
}

void Dram::check_refreshed(const Mark& now) {
    if (now.tck > refresh_due_) {
        violate("REFI", now,
                "more than " + std::to_string(rules_.postponed) + " refreshes are owed since tCK " +
                    std::to_string(refresh_due_) + " (cycle " +
                    std::to_string(refresh_due_ / rules_.tck_per_cycle) + ")");
    }
}

void Dram::take_bus(unsigned bus, std::int64_t tck, const Mark& now) {
    Mark& taken = bus_[bus][static_cast<std::size_t>(tck) % kBusTcks];
    if (taken.tck == tck) violate("command bus", now, "it meets " + describe(taken));
    taken = {tck, now.command, now.bank};
}

void Dram::at_least(const char* rule, const Mark& earlier, const Mark& now, std::int64_t least) {
    if (now.tck - earlier.tck >= least) return;
    violate(rule, now,
            std::to_string(now.tck - earlier.tck) + " tCK after " + describe(earlier) + ", must be at least " +
                std::to_string(least));
}

void Dram::violate(const char* rule, const Mark& now, const std::string& what) {
    if (!violation_.empty()) return;
    violation_ = "DRAM rule broken: " + std::string(rule) + " of " + part_ + ", channel " + std::to_string(channel_) +
                 ", sub-channel " + std::to_string(subchannel_) + ": " + describe(now) + ": " + what;
    if (failure_) {
        failure_->raise(violation_);
    } else {
        std::fprintf(stderr, "%s\n", violation_.c_str());
    }
}

std::string Dram::describe(const Mark& mark) const {
    if (mark.tck == kNever.tck) return "nothing";
    const std::string bank = mark.bank < 0 ? "all banks" : "bank " + std::to_string(mark.bank);
    return std::string(mark.command) + " (" + bank + ") at tCK " + std::to_string(mark.tck) + " (cycle " +
           std::to_string(mark.tck / rules_.tck_per_cycle) + ")";
}

}  // namespace nearkv

// What nearkv_dram.sv imports. Of commands the result says whether the simulator has to stop.
extern "C" {

void* nearkv_dram_open(int channel, int subchannel, const char* part, const char* rules) {
    return new nearkv::Dram(static_cast<unsigned>(channel), static_cast<unsigned>(subchannel), part, rules);
}

void nearkv_dram_reset(void* dram) { static_cast<nearkv::Dram*>(dram)->reset(); }

void nearkv_dram_close(void* dram) { delete static_cast<nearkv::Dram*>(dram); }

unsigned char nearkv_dram_activate(void* box, long long cycle, unsigned char odd, unsigned char late, unsigned bank,
                                   unsigned row) {
    auto* dram = static_cast<nearkv::Dram*>(box);
    dram->activate(cycle, odd != 0, late != 0, bank, row);
    return dram->must_stop();
}

unsigned char nearkv_dram_precharge(void* box, long long cycle, unsigned char odd, unsigned char all, unsigned bank) {
    auto* dram = static_cast<nearkv::Dram*>(box);
    dram->precharge(cycle, odd != 0, all != 0, bank);
    return dram->must_stop();
}

unsigned char nearkv_dram_refresh(void* box, long long cycle, unsigned char odd, unsigned char all, unsigned set) {
    auto* dram = static_cast<nearkv::Dram*>(box);
    dram->refresh(cycle, odd != 0, all != 0, set);
    return dram->must_stop();
}

unsigned char nearkv_dram_read(void* box, long long cycle, unsigned char odd, unsigned bank, unsigned column) {
    auto* dram = static_cast<nearkv::Dram*>(box);
    dram->read(cycle, odd != 0, bank, column);
    return dram->must_stop();
}

unsigned char nearkv_dram_write(void* box, long long cycle, unsigned char odd, unsigned bank, unsigned column,
                                const std::uint32_t* data, unsigned long long check, unsigned char poison) {
    auto* dram = static_cast<nearkv::Dram*>(box);
    dram->write(cycle, odd != 0, bank, column, data, check, poison != 0);
    return dram->must_stop();
}

unsigned char nearkv_dram_take(void* box, std::uint32_t* data, unsigned long long* check) {
    const nearkv::Dram::Line& line = static_cast<nearkv::Dram*>(box)->take();
    std::copy(line.data.begin(), line.data.end(), data);
    *check = line.check;
    return line.poison;
}
}

// What Python calls.
#pragma GCC visibility push(default)
extern "C" {

// Inverts bits of a stored line. `device` is what nearkv_events returns, null under cocotb. Returns how many bits were
// inverted: fewer than asked where there is no such place.
std::uint64_t nearkv_dram_flip(const nearkv::Events* device, std::uint32_t channel, std::uint32_t subchannel,
                               std::uint32_t bank, std::uint32_t row, std::uint32_t column, const std::uint32_t* bits,
                               std::uint64_t count) {
    const std::lock_guard lock(nearkv::all_mutex);
    for (nearkv::Dram* dram : nearkv::all) {
        if (!dram->is(device, channel, subchannel)) continue;
        std::uint64_t done = 0;
        while (done < count && dram->flip(bank, row, column, bits[done])) done++;
        return done;
    }
    return 0;
}
}
#pragma GCC visibility pop
