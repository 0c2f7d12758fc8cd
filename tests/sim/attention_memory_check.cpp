// The attention kernel without memory, from every allocation of its caller's on: once it says so, nothing is written to
// the results any more.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "attention.h"

namespace {

thread_local int allocations_left = -1;  // of the thread that counts them; the others have what they want

constexpr std::size_t kLine = nearkv::kLineBytes;
constexpr std::int64_t kRows = 4096;
constexpr std::uint8_t kUntouched = 0xA5;

// The kernel with so many allocations: whether it had enough.
bool attend(int allocations, const std::vector<std::uint8_t>& image, std::vector<nearkv::Job>& jobs) {
    const auto bytes = static_cast<std::size_t>(jobs[0].group * jobs[0].result_bytes);
    std::vector<std::uint8_t> results(jobs.size() * bytes);
    for (std::size_t i = 0; i < jobs.size(); i++) jobs[i].result = results.data() + i * bytes;
    allocations_left = allocations;
    const bool enough = nearkv_attend(image.data(), jobs.data(), jobs.size(), 4) == 0;
    allocations_left = -1;
    if (enough) return true;
    std::fill(results.begin(), results.end(), kUntouched);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    if (std::any_of(results.begin(), results.end(), [](std::uint8_t byte) { return byte != kUntouched; })) {
        std::printf("written to after %d allocations\n", allocations);
        std::exit(1);
    }
    return false;
}

}  // namespace

void* operator new(std::size_t size) {
    if (allocations_left == 0) throw std::bad_alloc();
    if (allocations_left > 0) allocations_left--;
    if (void* found = std::malloc(size)) return found;
    throw std::bad_alloc();
}
void operator delete(void* what) noexcept { std::free(what); }
void operator delete(void* what, std::size_t) noexcept { std::free(what); }

int main() {
    nearkv::Job job{};
    job.head_dim = job.value_dim = 128;
    job.group = 4;
    job.query_rows = 1;
    job.k_pitch = job.v_pitch = 4 * static_cast<std::int32_t>(kLine);
    job.page_rows_log2 = 13;
    job.v_at = job.k_pitch << job.page_rows_log2;
    job.factor = 0x3E000000u;
    job.form = nearkv::kFormFp32;
    job.row_end = kRows;
    job.query_line = 8 << job.page_rows_log2;
    job.sink_line = -1;
    job.denominator = 8 * static_cast<std::int32_t>(kLine);
    job.result_bytes = 9 * static_cast<std::int64_t>(kLine);
    const std::uint64_t entry = 1;
    job.entries = &entry;
    const std::vector<std::uint8_t> image(static_cast<std::size_t>(job.query_line + 16) * kLine);
    std::vector<nearkv::Job> jobs(8, job);
    for (int allocations = 0; allocations < 12; allocations++) attend(allocations, image, jobs);
    return attend(-1, image, jobs) ? 0 : 1;
}
