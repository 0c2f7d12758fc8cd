// The host in the process: owns the Verilated device, runs its clock, and turns programs of line accesses into
// CXL.mem messages and back. nearkv_sim/port.py says what a program is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "messages.h"
#include "verilated.h"

#if VM_TRACE
#include "verilated_fst_c.h"
#endif

class Vtop;

namespace nearkv {

enum class Kind : std::uint32_t { kWrite = 0, kRead = 1, kFence = 2, kPoll = 3 };
enum class Access : std::uint8_t { kData = 0, kOutside = 1, kPoison = 2 };
enum class Status : int { kDone = 0, kRunning = 1, kTimeout = 2, kBroken = 3 };

// One operation of a program; laid out as `_Operation` in nearkv_sim/rtl.py.
struct Operation {
    Kind kind;
    std::uint32_t reserved;
    std::uint64_t count;             // lines of a read or write
    const std::uint64_t* addresses;  // host byte addresses
    std::uint8_t* data;              // lines: what to write, or where reads go
    const std::uint64_t* enables;    // of a write, a bit per byte; null for whole lines
    Access* access;                  // of a read, how each line was answered
    std::uint64_t address;           // of a poll
    std::uint64_t mask;
    std::uint64_t value;
    std::uint64_t timeout_cycles;
};

// How the host disturbs the device: probabilities, in 1 / 2^32, of a cycle without a message and without ready.
struct Disturbance {
    std::uint32_t idle;
    std::uint32_t backpressure;
    std::uint64_t seed;
};

class Host {
public:
    explicit Host(const Disturbance& disturbance);
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;
    ~Host();

    // Takes a program, whose memory must last until it has ended.
    void start(const Operation* operations, std::size_t count);
    // Runs at most `cycles` cycles of it.
    Status advance(std::uint64_t cycles);
    // Records waveforms from here on; false where the device was built without them.
    bool start_wave(const char* path);

    std::uint64_t cycles() const { return cycles_; }
    std::uint64_t link_bytes() const { return link_bytes_; }
    const std::string& message() const { return message_; }

private:
    // The next line of one kind of access that the present segment has to send.
    struct Cursor {
        std::size_t operation;
        std::uint64_t line;
    };
    struct Outstanding {
        const Operation* operation;  // null while the tag is free
        std::uint64_t line;
    };
    static constexpr std::size_t kTags = 256;

    bool next_segment();
    bool pending(Cursor& cursor, Kind kind) const;
    void offer_messages();
    void send_read();
    void send_write();
    bool poll_is_due() const;
    void take_completion();
    void take_data();
    void end_poll(const std::uint32_t* data, Access access);
    Outstanding* answered(std::uint64_t tag, bool write);
    std::uint32_t take_tag(const Operation* operation, std::uint64_t line);
    void check_stability();
    void cycle();
    void evaluate(bool clock);
    bool chance(std::uint32_t probability);
    void fail(Status status, std::string message);

    std::unique_ptr<VerilatedContext> context_;
    std::unique_ptr<Vtop> top_;
#if VM_TRACE
    std::unique_ptr<VerilatedFstC> wave_;
#endif
    Disturbance disturbance_;
    std::uint64_t random_;

    const Operation* operations_ = nullptr;
    std::size_t operation_count_ = 0;
    std::size_t segment_end_ = 0;
    Cursor reads_{};
    Cursor writes_{};
    const Operation* poll_ = nullptr;  // the segment is this poll
    std::uint64_t poll_started_ = 0;
    std::uint64_t poll_next_ = 0;
    std::array<Outstanding, kTags> outstanding_{};
    std::vector<std::uint32_t> free_tags_;

    Status status_ = Status::kDone;
    std::string message_;
    std::uint64_t cycles_ = 0;
    std::uint64_t link_bytes_ = 0;
    std::uint64_t last_progress_ = 0;
    bool ndr_held_ = false;
    bool drs_held_ = false;
    std::uint32_t held_ndr_ = 0;
    std::array<std::uint32_t, messages::kDrsWords> held_drs_{};
};

}  // namespace nearkv
