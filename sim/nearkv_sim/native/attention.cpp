// The attention of the contract (docs/numerics.md) over a device's memory: jobs in, result lines out.
//
// Sums do not depend on the order of their terms, so rows are dealt to threads in pieces and each piece's partial
// results are merged as it ends.

#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "attention_partial.h"
#include "attention_rows.h"
#include "attention_seen.h"
#include "lanes.h"

namespace nearkv {
namespace {

// Less work than this is not worth a thread, and not a piece of its own.
constexpr std::int64_t kPieceTerms = 1 << 20;
// More pieces than threads, so that all end together.
constexpr std::int64_t kPiecesPerThread = 8;

std::int64_t terms_of(const Job& job) {
    return rows_of(job) * job.query_rows * job.group * (job.head_dim + job.value_dim);
}

// A job under way.
struct Task {
    const Job* job;
    std::int64_t pieces_left;
    std::unique_ptr<Partial> sums;
};

// Rows of a job, numbered from the first one of its runs on.
struct Piece {
    Task* task;
    std::int64_t begin;
    std::int64_t end;
};

class Batch {
public:
    Batch(const std::uint8_t* image, const Job* jobs, std::size_t count, unsigned threads) : image_(image) {
        std::int64_t all = 0;
        for (std::size_t i = 0; i < count; i++) all += terms_of(jobs[i]);
        threads_ = std::clamp<std::int64_t>(all / kPieceTerms, 1, std::max(threads, 1u));
        const std::int64_t terms = std::max(all / (threads_ * kPiecesPerThread) + 1, kPieceTerms);
        tasks_.resize(count);
        for (std::size_t i = 0; i < count; i++) cut(tasks_[i], jobs[i], threads_ == 1 ? all : terms);
        left_ = pieces_.size();
    }

    // Does everything. A thread that has not begun when all is done is not waited for: on busy cores that takes
    // milliseconds. It finds nothing left, whenever it comes, and needs no more than this object.
    static void run(const std::shared_ptr<Batch>& batch) {
        for (std::int64_t i = 1; i < batch->threads_; i++) {
            try {
                std::thread([batch] { batch->work(); }).detach();
            } catch (const std::exception&) {
                break;  // no thread, or no memory for one: those that are there do it all, and are waited for
            }
        }
        batch->work();
        while (const std::size_t left = batch->left_) batch->left_.wait(left);
        if (batch->out_of_memory_) throw std::bad_alloc();
    }

private:
    void cut(Task& task, const Job& job, std::int64_t terms) {
        const std::int64_t rows = rows_of(job);
        const std::int64_t queries = static_cast<std::int64_t>(job.group) * job.query_rows;
        const std::int64_t row_terms = queries * (job.head_dim + job.value_dim);
        const std::int64_t blocks = std::max<std::int64_t>(terms / row_terms / kBlock, 1);
        task = {&job, 0, nullptr};
        std::int64_t begin = 0;
        do {
            const std::int64_t end = std::min(begin + blocks * kBlock, rows);
            pieces_.push_back({&task, begin, end});
            task.pieces_left++;
            begin = end;
        } while (begin < rows);
    }

    void work() {
        const RoundTowardZero exact;
        for (std::size_t next = next_++; next < pieces_.size(); next = next_++) {
            try {
                add(pieces_[next]);
            } catch (const std::bad_alloc&) {
                out_of_memory_ = true;
            }
            if (--left_ == 0) left_.notify_one();
        }
    }

    void add(const Piece& piece) {
        Task& task = *piece.task;
        const Job& job = *task.job;
        auto sums = std::make_unique<Partial>(job);
        RowWorker(image_, job, *sums).add(piece.begin, piece.end);
        {
            const std::lock_guard lock(mutex_);
            if (task.sums) {
                task.sums->merge(*sums);
            } else {
                task.sums = std::move(sums);
            }
            if (--task.pieces_left > 0) return;
        }
        if (job.sink_line >= 0) {
            std::vector<std::uint32_t> sinks(static_cast<std::size_t>(job.group));
            std::memcpy(sinks.data(), image_ + static_cast<std::size_t>(job.sink_line) * kLineBytes,
                        sinks.size() * sizeof sinks[0]);
            task.sums->add_sinks(sinks.data());
        }
        task.sums->write(job);
        task.sums.reset();
    }

    static constexpr std::int64_t kBlock = kBlockRows;

    const std::uint8_t* image_;
    std::int64_t threads_;
    std::vector<Task> tasks_;
    std::vector<Piece> pieces_;
    std::atomic<std::size_t> next_ = 0;
    std::atomic<std::size_t> left_ = 0;
    std::atomic<bool> out_of_memory_ = false;
    std::mutex mutex_;
};

}  // namespace
}  // namespace nearkv

int nearkv_attend(const std::uint8_t* image, const nearkv::Job* jobs, std::size_t count, unsigned threads) {
    try {
        nearkv::Batch::run(std::make_shared<nearkv::Batch>(image, jobs, count, threads));
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
