#include "attention_walk.h"

#include <algorithm>
#include <cstring>

namespace nearkv {
namespace {

std::uint64_t field(const std::uint8_t* record, const Place& place) {
    std::uint64_t word;
    std::memcpy(&word, record + place.byte, sizeof word);
    return word >> place.shift & place.mask;
}

class Walk {
public:
    Walk(const Device& device, const Kind& kind, std::int64_t tenant) : device_(device), kind_(kind), tenant_(tenant) {}

    // Whether a descriptor's job is good; then its rows, lines and entries are known.
    bool look(const std::uint8_t* descriptor, std::int64_t* streamed) {
        return find_addresses(descriptor) && find_factors(descriptor) && find_entries(descriptor) &&
               find_pages(streamed);
    }

    void fill(Job& job, std::int64_t& result_line) const {
        job = kind_.job;
        job.entries = entries_;
        job.row_begin = begin_;
        job.row_end = end_;
        job.query_line = queries_;
        job.sink_line = kind_.sink_lines ? sinks_ : -1;
        job.factor = factor_;
        job.output_scale = output_scale_;
        result_line = result_;
    }

    void count_reads(std::int64_t* reads) const {
        reads[slice_of(table_)]++;
        reads[slice_of(queries_)] += kind_.query_lines;
        if (kind_.sink_lines) reads[slice_of(sinks_)] += kind_.passes;  // a line for each
        reads[slice_of(entry_line_)] += entry_lines_;
    }

private:
    static std::int64_t extent_of(std::int64_t line) { return line >> kExtentLinesShift; }
    std::int64_t slice_of(std::int64_t line) const { return extent_of(line) % device_.slices; }

    // Whether a run of lines lies in one extent that is the tenant's.
    bool allowed(std::int64_t first, std::int64_t lines) const {
        const std::int64_t extent = extent_of(first);
        return extent < device_.extents && device_.owners[extent] == tenant_ && extent_of(first + lines - 1) == extent;
    }

    bool find_run(const std::uint8_t* descriptor, const Place& place, std::int64_t lines, std::int64_t& first) const {
        const std::uint64_t address = field(descriptor, place);
        first = static_cast<std::int64_t>(address / kLineBytes);
        return address % kLineBytes == 0 && allowed(first, lines);
    }

    bool find_addresses(const std::uint8_t* descriptor) {
        return find_run(descriptor, kAttendTable, 1, table_) &&
               find_run(descriptor, kAttendQueries, kind_.query_lines, queries_) &&
               find_run(descriptor, kAttendResult, kind_.result_lines, result_) &&
               (!kind_.sink_lines || find_run(descriptor, kAttendSinks, kind_.sink_lines, sinks_));
    }

    bool find_factors(const std::uint8_t* descriptor) {
        constexpr std::uint32_t kExponent = 0x7F800000;
        factor_ = static_cast<std::uint32_t>(field(descriptor, kAttendScoreFactor));
        output_scale_ = static_cast<std::uint32_t>(field(descriptor, kAttendOutputScale));
        return (factor_ & kExponent) != kExponent;
    }

    bool find_entries(const std::uint8_t* descriptor) {
        const std::uint8_t* header = device_.image + table_ * kLineBytes;
        const auto entries = static_cast<std::int64_t>(field(header, kTableEntries));
        const auto committed = static_cast<std::int64_t>(field(header, kTableCommittedRows));
        const auto head = static_cast<std::int64_t>(field(descriptor, kAttendKvHead));
        const int log2 = kind_.job.page_rows_log2;
        if (field(header, kTableMagic) != kTableMagicNumber || field(header, kTableVersion) != kLayoutVersion ||
            head >= static_cast<std::int64_t>(field(header, kTableHeads))) {
            return false;
        }
        begin_ = static_cast<std::int64_t>(field(descriptor, kAttendRowBegin));
        end_ = static_cast<std::int64_t>(field(descriptor, kAttendRowEnd));
        if (begin_ >= end_ || end_ > committed || end_ > entries << log2 || end_ > kMaxRows) return false;
        const std::int64_t first = begin_ >> log2;
        const std::int64_t last = (end_ - 1) >> log2;
        const std::int64_t heads = table_ + 1 + head * ((entries + kEntriesPerLine - 1) / kEntriesPerLine);
        pages_ = last - first + 1;
        entry_line_ = heads + first / kEntriesPerLine;
        entry_lines_ = heads + last / kEntriesPerLine + 1 - entry_line_;
        if (!allowed(entry_line_, entry_lines_)) return false;
        entries_ = reinterpret_cast<const std::uint64_t*>(device_.image + heads * kLineBytes) + first;
        return true;
    }

    // Every entry names a page of the tenant's; counts the lines of their visible rows.
    bool find_pages(std::int64_t* streamed) const {
        const int log2 = kind_.job.page_rows_log2;
        const std::int64_t page_rows = std::int64_t{1} << log2;
        std::int64_t row = begin_;
        for (std::int64_t i = 0; i < pages_; i++) {
            const std::uint64_t entry = entries_[i];
            const auto page = static_cast<std::int64_t>(entry >> kEntryLineShift & kEntryLineMask);
            if ((entry & kEntryFixedBits) != 1 || !allowed(page, kind_.page_lines)) return false;
            const std::int64_t until = std::min((row & -page_rows) + page_rows, end_);
            const std::int64_t first = row & -page_rows;
            streamed[slice_of(page)] += lines_of_rows(row - first, until - first);
            row = until;
        }
        return true;
    }

    // Lines that hold codes and scales of rows of a page.
    std::int64_t lines_of_rows(std::int64_t begin, std::int64_t end) const {
        const Job& job = kind_.job;
        std::int64_t lines = 0;
        for (const std::int64_t pitch : {job.k_pitch, job.k_scale_pitch, job.v_pitch, job.v_scale_pitch}) {
            if (pitch) lines += (end * pitch + kLineBytes - 1) / kLineBytes - begin * pitch / kLineBytes;
        }
        return lines;
    }

    const Device& device_;
    const Kind& kind_;
    std::int64_t tenant_;
    std::int64_t table_ = 0;
    std::int64_t queries_ = 0;
    std::int64_t result_ = 0;
    std::int64_t sinks_ = 0;
    std::uint32_t factor_ = 0;
    std::uint32_t output_scale_ = 0;
    std::int64_t begin_ = 0;
    std::int64_t end_ = 0;
    std::int64_t pages_ = 0;
    std::int64_t entry_line_ = 0;
    std::int64_t entry_lines_ = 0;
    const std::uint64_t* entries_ = nullptr;
};

}  // namespace
}  // namespace nearkv

void nearkv_walk(const nearkv::Device* device, const nearkv::Kind* kind, std::int64_t tenant,
                 const std::uint8_t* descriptors, std::size_t count, std::uint8_t* staging, nearkv::Job* jobs,
                 std::int64_t* result_lines, std::int64_t* streamed, std::int64_t* reads) {
    for (std::size_t i = 0; i < count; i++) {
        nearkv::Walk walk(*device, *kind, tenant);
        std::int64_t* of_job = streamed + i * static_cast<std::size_t>(device->slices);
        std::fill_n(of_job, device->slices, 0);
        result_lines[i] = -1;
        if (!walk.look(descriptors + i * nearkv::kLineBytes, of_job)) continue;
        walk.fill(jobs[i], result_lines[i]);
        jobs[i].result = staging + i * static_cast<std::size_t>(kind->result_lines * nearkv::kLineBytes);
        walk.count_reads(reads);
    }
}
