// The walk of descriptors over random memory, for the sanitizers: whatever tables and descriptors hold, nothing beyond
// the memory is read, and the jobs that are found good can be carried out.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "attention.h"
#include "attention_walk.h"

namespace {

constexpr std::size_t kLine = nearkv::kLineBytes;
constexpr std::int64_t kExtents = 4;
constexpr std::int64_t kExtentLines = std::int64_t{1} << nearkv::kExtentLinesShift;
constexpr std::int64_t kLines = kExtents * kExtentLines;
constexpr std::int64_t kSlices = 2;
constexpr std::size_t kDescriptors = 16;
constexpr int kScaleLines = 4;  // of the scales of as many rows as a page may have here

class Check {
public:
    explicit Check(std::uint32_t seed) : random_(seed), image_(static_cast<std::size_t>(kLines) * kLine) {}

    // Descriptors that were found good, of so many drawn.
    std::size_t run(int rounds) {
        std::size_t good = 0;
        for (int i = 0; i < rounds; i++) good += round();
        return good;
    }

private:
    std::size_t round() {
        std::int8_t owners[kExtents];
        for (std::int8_t& owner : owners) owner = static_cast<std::int8_t>(pick(0, 9) ? 0 : pick(-1, 1));
        const nearkv::Device device{image_.data(), owners, kExtents, kSlices};
        const nearkv::Kind kind = draw_kind();
        std::vector<std::uint8_t> descriptors(kDescriptors * kLine);
        for (std::size_t i = 0; i < kDescriptors; i++) draw(descriptors.data() + i * kLine, kind);
        std::vector<std::uint8_t> staging(kDescriptors * static_cast<std::size_t>(kind.result_lines) * kLine);
        std::vector<nearkv::Job> jobs(kDescriptors);
        std::vector<std::int64_t> result_lines(kDescriptors);
        std::vector<std::int64_t> streamed(kDescriptors * kSlices);
        std::vector<std::int64_t> reads(kSlices);
        nearkv_walk(&device, &kind, 0, descriptors.data(), kDescriptors, staging.data(), jobs.data(),
                    result_lines.data(), streamed.data(), reads.data());
        std::vector<nearkv::Job> good;
        for (std::size_t i = 0; i < kDescriptors; i++) {
            if (result_lines[i] < 0) continue;
            good.push_back(jobs[i]);
            if (result_lines[i] + kind.result_lines > kLines) fail("a result beyond the memory");
            const std::int64_t rows = jobs[i].row_end - jobs[i].row_begin;
            const std::int64_t least = rows * (jobs[i].k_pitch + jobs[i].v_pitch) / static_cast<int>(kLine);
            if (streamed[2 * i] + streamed[2 * i + 1] < least) fail("rows that are not all counted");
        }
        if (good.empty() != (reads[0] + reads[1] == 0)) fail("reads of no job");
        if (nearkv_attend(image_.data(), good.data(), good.size(), 1) != 0) std::abort();
        return good.size();
    }

    nearkv::Kind draw_kind() {
        nearkv::Kind kind{};
        nearkv::Job& job = kind.job;
        job.head_dim = job.value_dim = 64;
        job.group = pick(1, 5);
        job.page_rows_log2 = pick(2, 7);
        job.factor = 0x3E000000u;
        job.form = nearkv::kFormFp32;
        job.denominator = 8 * static_cast<int>(kLine);
        job.result_bytes = 9 * static_cast<int>(kLine);
        kind.query_lines = 4 * job.group;
        kind.result_lines = 9 * job.group;
        kind.sink_lines = pick(0, 1);
        job.query_rows = 1;
        job.k_pitch = job.v_pitch = 32 * pick(1, 4);
        job.k_scale_pitch = pick(0, 1) ? 2 : 0;
        job.v_at = job.k_scales_at = job.k_pitch << job.page_rows_log2;
        if (job.k_scale_pitch) job.v_at += kScaleLines * static_cast<int>(kLine);
        job.v_scales_at = job.v_at + (job.v_pitch << job.page_rows_log2);
        job.k_format = job.v_format = 5;
        job.head_dim = job.value_dim = job.k_pitch;
        job.k_scale = job.k_scale_pitch ? 2 : 0;
        kind.page_lines = job.v_scales_at / static_cast<int>(kLine);
        kind.passes = 1;
        return kind;
    }

    // A descriptor whose table is there, unless something goes wrong with either.
    void draw(std::uint8_t* descriptor, const nearkv::Kind& kind) {
        const std::int64_t entries = pick(1, 40);
        const std::int64_t committed = std::min<std::int64_t>(pick(1, 600), entries << kind.job.page_rows_log2);
        const std::int64_t end = pick(1, static_cast<int>(committed));
        const std::int64_t table = somewhere();
        put(descriptor, nearkv::kAttendTable, address(table));
        put(descriptor, nearkv::kAttendQueries, address(somewhere()));
        put(descriptor, nearkv::kAttendResult, address(somewhere()));
        put(descriptor, nearkv::kAttendSinks, address(somewhere()));
        put(descriptor, nearkv::kAttendRowBegin, spoilt(pick(0, static_cast<int>(end))));
        put(descriptor, nearkv::kAttendRowEnd, spoilt(end));
        put(descriptor, nearkv::kAttendKvHead, static_cast<std::uint64_t>(pick(0, 9) ? 0 : pick(0, 2047)));
        std::uint8_t* header = image_.data() + static_cast<std::size_t>(table) * kLine;
        put(header, nearkv::kTableMagic, nearkv::kTableMagicNumber);
        put(header, nearkv::kTableVersion, nearkv::kLayoutVersion);
        put(header, nearkv::kTableHeads, pick(0, 9) ? 1 : bits());
        put(header, nearkv::kTableEntries, spoilt(entries));
        put(header, nearkv::kTableCommittedRows, spoilt(committed));
        for (std::int64_t i = 0; i < entries; i++) {
            const std::size_t at = (static_cast<std::size_t>(table) + 1) * kLine + static_cast<std::size_t>(i) * 8;
            if (at + 8 > image_.size()) break;
            const std::uint64_t page = pick(0, 200) ? static_cast<std::uint64_t>(somewhere()) : bits() << 12;
            const std::uint64_t entry = page << nearkv::kEntryLineShift | 1 | (pick(0, 200) ? 0 : bits());
            std::memcpy(image_.data() + at, &entry, sizeof entry);
        }
    }

    // A line, now and then close to the end of an extent or of the memory.
    std::int64_t somewhere() {
        const std::int64_t line = pick(0, kLines - 2 * kExtentLines) + pick(0, 1) * kExtentLines;
        const std::int64_t edge = pick(1, kExtents) * kExtentLines - pick(1, 40);
        return pick(0, 40) ? line : edge;
    }
    std::uint64_t address(std::int64_t line) {
        const std::uint64_t good = static_cast<std::uint64_t>(line) * kLine;
        return pick(0, 60) ? good : pick(0, 1) ? good + 4 : bits() << 32 | bits();
    }
    std::uint64_t spoilt(std::int64_t value) { return pick(0, 40) ? static_cast<std::uint64_t>(value) : bits(); }

    static void put(std::uint8_t* record, const nearkv::Place& place, std::uint64_t value) {
        std::uint64_t word;
        std::memcpy(&word, record + place.byte, sizeof word);
        word = (word & ~(place.mask << place.shift)) | (value & place.mask) << place.shift;
        std::memcpy(record + place.byte, &word, sizeof word);
    }
    [[noreturn]] static void fail(const char* what) {
        std::printf("%s\n", what);
        std::exit(1);
    }
    std::uint64_t bits() { return random_() & 0xFFFFFFFF; }
    int pick(std::int64_t least, std::int64_t most) {
        return static_cast<int>(std::uniform_int_distribution<std::int64_t>(least, most)(random_));
    }

    std::mt19937 random_;
    std::vector<std::uint8_t> image_;
};

}  // namespace

int main(int, char** arguments) {
    Check check(static_cast<std::uint32_t>(std::strtoul(arguments[1], nullptr, 10)));
    const std::size_t good = check.run(300);
    std::printf("%zu good\n", good);
    return good > 100 ? 0 : 1;
}
