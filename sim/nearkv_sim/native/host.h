// The host in the process: owns the Verilated device, runs its clock, and turns programs of line accesses into
// CXL.mem messages and back. nearkv_sim/port.py says what a program is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "events.h"
#include "failure.h"
#include "messages.h"
#include "verilated.h"

#if VM_TRACE
#include "verilated_fst_c.h"
#endif

class Vtop;

namespace nearkv {

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
    // Writes and reads a register of the HDM decoders between two programs; false where the device has none.
    bool write_register(std::uint32_t word, std::uint32_t value);
    bool read_register(std::uint32_t word, std::uint32_t* value);

    std::uint64_t cycles() const { return cycles_; }
    std::uint64_t link_bytes() const { return link_bytes_; }
    const std::string& message() const { return message_; }
    Events& events() { return events_; }

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
    static constexpr std::size_t kTags = 1024;
    enum Stream : std::size_t { kReq, kRwd, kNdr, kDrs, kStreams };
    // A port of the endpoint, with tags of its own.
    struct Lane {
        Lane(const Port& streams, std::array<std::uint32_t, kStreams> event_sources);

        Port port;
        std::array<std::uint32_t, kStreams> sources;  // of the events of each stream
        std::array<Outstanding, kTags> outstanding{};
        std::vector<std::uint32_t> free_tags;
        bool ndr_held = false;
        bool drs_held = false;
        std::uint32_t held_ndr = 0;
        std::array<std::uint32_t, messages::kDrsWords> held_drs{};
    };

    bool next_segment();
    bool pending(Cursor& cursor, Kind kind) const;
    void offer_messages(Lane& lane);
    void send_read(Lane& lane);
    void send_write(Lane& lane);
    bool poll_is_due() const;
    static std::uint64_t ld_id_of(const Operation& operation, std::uint64_t line);
    void note(const Lane& lane, Stream stream, std::uint64_t tag);
    void take_completion(Lane& lane);
    void take_data(Lane& lane);
    void end_poll(const std::uint32_t* data, Access access);
    Outstanding* answered(Lane& lane, std::uint64_t tag, std::uint64_t ld_id, bool write);
    std::uint32_t take_tag(Lane& lane, const Operation* operation, std::uint64_t line);
    void check_stability(Lane& lane);
    void cycle();
    void evaluate(bool clock);
    bool chance(std::uint32_t probability);
    void fail(Status status, std::string message);

    Events events_;
    Failure failure_;  // of a black box
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
    std::vector<Lane> lanes_;
    std::optional<RegisterPort> registers_;
    std::size_t under_way_ = 0;  // accesses without an answer

    Status status_ = Status::kDone;
    std::string message_;
    std::uint64_t cycles_ = 0;
    std::uint64_t link_bytes_ = 0;
    std::uint64_t last_progress_ = 0;
};

}  // namespace nearkv
