// The attention kernel over random memory, for the sanitizers: any codes, shapes, pages and threads; the results of one
// thread are those of several.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "attention.h"

namespace {

using nearkv::Job;

constexpr std::size_t kLine = nearkv::kLineBytes;

struct Case {
    std::vector<std::uint8_t> image;
    std::vector<std::vector<std::uint64_t>> entries;
    std::vector<Job> jobs;
    std::size_t result_bytes = 0;
};

class Generator {
public:
    explicit Generator(std::uint32_t seed) : random_(seed) {}

    // `rows` bounds the context, and lies exactly at the end of the image: what reads beyond it is found.
    Case draw(int jobs, int rows) {
        Case made;
        const int log2 = pick(2, 6);
        std::vector<std::size_t> result_at;
        std::size_t lines = 0;
        for (int i = 0; i < jobs; i++) {
            Job job{};
            job.head_dim = pick(1, 256);
            job.value_dim = pick(1, 256);
            job.group = pick(1, 9);
            job.k_format = pick(0, 1);
            job.v_format = pick(0, 1);
            job.query_format = pick(0, 1);
            job.page_rows_log2 = log2;
            job.factor = pick(0, 9) ? 0x3E000000u : bits() & ~0x40000000u;
            job.row_end = pick(0, rows);
            job.row_begin = pick(0, static_cast<int>(job.row_end));
            const std::size_t k_lines = lines_of(2 * job.head_dim);
            const std::size_t v_lines = lines_of(2 * job.value_dim);
            job.sink_line = pick(0, 1) ? static_cast<std::int64_t>(lines) : -1;
            lines += lines_of(4 * job.group);
            job.query_line = static_cast<std::int64_t>(lines);
            lines += k_lines * static_cast<std::size_t>(job.group);
            std::vector<std::uint64_t> entries;
            for (std::int64_t page = job.row_begin >> log2; page << log2 < job.row_end; page++) {
                entries.push_back(lines << nearkv::kEntryLineShift | 1);
                lines += (k_lines + v_lines) << log2;
            }
            made.entries.push_back(std::move(entries));
            job.form = pick(0, 3);
            const int lane_bytes[] = {4, 2, 2, 4};
            std::size_t offset = lines_of(lane_bytes[job.form] * job.value_dim) * kLine;
            if (job.form == nearkv::kFormPartial) {
                job.high = static_cast<std::int32_t>(offset);
                job.low = static_cast<std::int32_t>(offset += lines_of(8 * job.value_dim) * kLine);
                job.flags = static_cast<std::int32_t>(offset += lines_of(8 * job.value_dim) * kLine);
                offset += lines_of(job.value_dim) * kLine;
            }
            job.denominator = static_cast<std::int32_t>(offset);
            job.result_bytes = static_cast<std::int64_t>(offset + kLine);
            result_at.push_back(made.result_bytes);
            made.result_bytes += static_cast<std::size_t>(job.group) * (offset + kLine);
            made.jobs.push_back(job);
        }
        made.image.resize(lines * kLine);
        const bool wild = pick(0, 2) == 0;
        for (std::size_t i = 0; i < made.image.size(); i += 2) {
            const std::uint32_t code = wild ? bits() : (bits() & 0x81FFu) | 0x3E00u;
            made.image[i] = static_cast<std::uint8_t>(code);
            made.image[i + 1] = static_cast<std::uint8_t>(code >> 8);
        }
        for (std::size_t i = 0; i < made.jobs.size(); i++) made.jobs[i].entries = made.entries[i].data();
        return made;
    }

private:
    static std::size_t lines_of(int bytes) { return (static_cast<std::size_t>(bytes) + kLine - 1) / kLine; }
    std::uint32_t bits() { return static_cast<std::uint32_t>(random_()); }
    int pick(int least, int most) { return std::uniform_int_distribution<int>(least, most)(random_); }

    std::mt19937 random_;
};

std::vector<std::uint8_t> results(Case& of, unsigned threads) {
    std::vector<std::uint8_t> out(of.result_bytes, 0xAA);
    std::uint8_t* at = out.data();
    for (Job& job : of.jobs) {
        job.result = at;
        at += job.result_bytes * job.group;
    }
    if (nearkv_attend(of.image.data(), of.jobs.data(), of.jobs.size(), threads) != 0) std::abort();
    return out;
}

}  // namespace

int main(int, char** arguments) {
    Generator generator(static_cast<std::uint32_t>(std::strtoul(arguments[1], nullptr, 10)));
    for (int i = 0; i < 60; i++) {
        const bool large = i % 20 == 0;  // enough for several threads
        Case drawn = generator.draw(large ? 6 : 3, large ? 9000 : 90);
        if (results(drawn, 1) != results(drawn, 3)) {
            std::printf("case %d: threads change the result\n", i);
            return 1;
        }
    }
    return 0;
}
