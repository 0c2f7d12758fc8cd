// The attention kernel over random memory, for the sanitizers: any codes, shapes, pages and threads; the results of one
// thread are those of several.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "attention.h"

namespace {

using nearkv::Job;

constexpr std::size_t kLine = nearkv::kLineBytes;

// What jobs point to.
struct Lists {
    std::vector<std::int64_t> runs;
    std::vector<std::int64_t> positions;
    std::vector<std::uint8_t> tree;
    std::vector<std::uint32_t> slopes;
    std::vector<std::uint16_t> codebooks;
};

struct Case {
    std::vector<std::uint8_t> image;
    std::vector<std::vector<std::uint64_t>> entries;
    std::vector<std::unique_ptr<Lists>> lists;
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
            job.head_dim = pick(1, pick(0, 5) ? 256 : 1023);
            job.value_dim = pick(1, 256);
            job.group = pick(1, 9);
            job.query_rows = pick(0, 2) ? 1 : pick(1, 5);
            job.k_format = pick(0, 7);
            job.v_format = pick(0, 7);
            job.query_format = pick(0, 1);
            job.page_rows_log2 = log2;
            job.factor = pick(0, 9) ? 0x3E000000u : bits() & ~0x40000000u;
            job.softcap = pick(0, 3) ? 0 : 0x42000000u;
            job.output_scale = pick(0, 3) ? 0 : bits() | 1;
            job.row_end = pick(0, rows);
            job.row_begin = pick(0, static_cast<int>(job.row_end));
            job.sink_line = pick(0, 1) ? static_cast<std::int64_t>(lines) : -1;
            lines += lines_of(4 * job.group);
            job.query_line = static_cast<std::int64_t>(lines);
            lines += lines_of(2 * job.head_dim) * static_cast<std::size_t>(job.group * job.query_rows);
            const std::size_t page_lines = place(job);
            see(made, job);
            std::vector<std::uint64_t> entries;
            for (std::int64_t page = job.row_begin >> log2; page << log2 < job.row_end; page++) {
                entries.push_back(lines << nearkv::kEntryLineShift | 1);
                lines += page_lines;
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
            made.result_bytes += static_cast<std::size_t>(job.group * job.query_rows) * (offset + kLine);
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
    // Scales, pitches and areas of a job's rows; the lines of a page.
    std::size_t place(Job& job) {
        const auto bits_of = [](int format) { return nearkv::kFormats[format].bits; };
        int at = 0;
        const auto area = [&](int pitch) {
            const int begin = at;
            at += static_cast<int>(lines_of(pitch << job.page_rows_log2) * kLine);
            return begin;
        };
        const auto codes = [&](int dim, int format) {
            const int bytes = (dim * bits_of(format) + 7) / 8;
            if (bytes <= 32 && pick(0, 1)) return bytes <= 16 ? 16 : 32;
            return static_cast<int>(lines_of(bytes) * kLine);
        };
        const auto scales = [&](int dim, int format, std::int32_t& scale, std::int32_t& block) {
            if (bits_of(format) > 8 || pick(0, 1)) return 0;
            scale = pick(1, 4);
            block = pick(0, 1) ? 0 : 8 << pick(1, 4);
            const int count = block ? (dim + block - 1) / block : 1;
            int pitch = 1;
            while (pitch < count * nearkv::kScales[scale - 1].bits / 8) pitch *= 2;
            return pitch;
        };
        job.k_pitch = codes(job.head_dim, job.k_format);
        area(job.k_pitch);
        job.k_scale_pitch = scales(job.head_dim, job.k_format, job.k_scale, job.k_block);
        job.k_scales_at = area(job.k_scale_pitch);
        job.latent = pick(0, 5) == 0;
        if (job.latent) {
            job.value_dim = std::min(job.value_dim, job.head_dim);
        } else {
            job.v_pitch = codes(job.value_dim, job.v_format);
            job.v_at = area(job.v_pitch);
            job.v_scale_pitch = scales(job.value_dim, job.v_format, job.v_scale, job.v_block);
            job.v_scales_at = area(job.v_scale_pitch);
        }
        return static_cast<std::size_t>(at) / kLine;
    }

    // Runs, positions, masks, slopes and codebooks of a job.
    void see(Case& made, Job& job) {
        made.lists.push_back(std::make_unique<Lists>());
        Lists& lists = *made.lists.back();
        if (pick(0, 1)) {
            for (auto row = static_cast<int>(job.row_begin); row < job.row_end;) {
                const int begin = row + pick(0, 20);
                row = begin + pick(1, 50);
                if (row <= job.row_end) lists.runs.insert(lists.runs.end(), {begin, row});
            }
            job.run_count = static_cast<std::int64_t>(lists.runs.size() / 2);
            lists.runs.resize(lists.runs.size() + 2);
            job.runs = lists.runs.data();
        }
        for (int i = 0; i < job.query_rows; i++) lists.positions.push_back(pick(-3, static_cast<int>(job.row_end)));
        job.positions = lists.positions.data();
        job.causal = pick(0, 1);
        job.window = pick(0, 1) ? pick(1, 40) : 0;
        job.kept = pick(0, 20);
        if (job.query_rows <= job.row_end && pick(0, 1)) {
            lists.tree.resize(static_cast<std::size_t>(job.query_rows) * nearkv::kTreeRowBytes);
            for (std::uint8_t& byte : lists.tree) byte = static_cast<std::uint8_t>(bits());
            job.tree = lists.tree.data();
            job.own_rows = job.row_end - job.query_rows;
        }
        if (pick(0, 1)) {
            for (int i = 0; i < job.group; i++) lists.slopes.push_back(0x3E000000u);
            job.slopes = lists.slopes.data();
        }
        for (int i = 0; i < 2 * nearkv::kLutEntries; i++) lists.codebooks.push_back(static_cast<std::uint16_t>(bits()));
        job.codebooks = lists.codebooks.data();
    }

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
        at += job.result_bytes * job.group * job.query_rows;
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
