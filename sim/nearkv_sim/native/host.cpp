#include "host.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "Vtop.h"
#include "bits.h"
#include "store.h"

namespace nearkv {
namespace {

constexpr std::size_t kLineWords = kLineBytes / 4;
constexpr int kResetCycles = 4;
// Without an answer for so long the device hangs.
constexpr std::uint64_t kHangCycles = 2'000'000;
// The longer a poll has waited, the rarer it asks, at most once in this many cycles beyond the answer's latency.
constexpr std::uint64_t kPollGapCycles = 64;

std::string describe(const char* format, std::uint64_t a, std::uint64_t b = 0) {
    std::array<char, 200> text;
    std::snprintf(text.data(), text.size(), format, a, b);
    return text.data();
}

}  // namespace

Host::Host(const Disturbance& disturbance)
    : context_(std::make_unique<VerilatedContext>()), disturbance_(disturbance), random_(disturbance.seed | 1) {
    const Events::Scope events(events_);
    const Failure::Scope failure(failure_);
    context_->traceEverOn(VM_TRACE != 0);
    top_ = std::make_unique<Vtop>(context_.get(), "top");
    for (const Port& port : ports_of(*top_)) {
        const std::string number = "." + std::to_string(lanes_.size());
        lanes_.emplace_back(port, std::array{events_.source("link.m2s_req" + number),
                                             events_.source("link.m2s_rwd" + number),
                                             events_.source("link.s2m_ndr" + number),
                                             events_.source("link.s2m_drs" + number)});
    }
    registers_ = register_port(*top_);
    for (int i = 0; i < 2 * kResetCycles; i++) {  // as many after reset: it passes a register on its way in
        top_->rst = i < kResetCycles;
        evaluate(false);
        evaluate(true);
    }
}

Host::Lane::Lane(const Port& streams, std::array<std::uint32_t, kStreams> event_sources)
    : port(streams), sources(event_sources) {
    for (std::uint32_t tag = 0; tag < kTags; tag++) free_tags.push_back(tag);
}

Host::~Host() {
    // What ends now looks for its context there, where another device may have left its own.
    Verilated::threadContextp(context_.get());
#if VM_TRACE
    if (wave_) wave_->close();
#endif
    top_->final();
}

void Host::start(const Operation* operations, std::size_t count) {
    if (status_ == Status::kRunning) {
        fail(Status::kBroken, "the last program was interrupted; open the device anew");
    }
    if (status_ == Status::kBroken) return;
    operations_ = operations;
    operation_count_ = count;
    segment_end_ = 0;
    status_ = next_segment() ? Status::kRunning : Status::kDone;
}

Status Host::advance(std::uint64_t cycles) {
    for (; cycles > 0 && status_ == Status::kRunning; cycles--) {
        cycle();
        if (status_ != Status::kRunning) break;
        const bool idle = under_way_ == 0;
        if (idle && !poll_ && !pending(reads_, Kind::kRead) && !pending(writes_, Kind::kWrite)) {
            if (!next_segment()) status_ = Status::kDone;
        } else if (!idle && cycles_ - last_progress_ > kHangCycles) {
            fail(Status::kBroken, describe("%" PRIu64 " accesses have had no answer for %" PRIu64 " cycles",
                                           under_way_, kHangCycles));
        }
    }
    return status_;
}

bool Host::start_wave([[maybe_unused]] const char* path) {
#if VM_TRACE
    if (wave_) wave_->close();
    wave_ = std::make_unique<VerilatedFstC>();
    top_->trace(wave_.get(), 99);
    wave_->open(path);
    return wave_->isOpen();
#else
    return false;
#endif
}

bool Host::write_register(std::uint32_t word, std::uint32_t value) {
    if (!registers_) return false;
    *registers_->write_payload = word | std::uint64_t{value} << kRegisterWordBits;
    *registers_->write_valid = 1;
    bool taken = false;
    while (!taken) {
        taken = *registers_->write_ready;  // from a register
        cycle();
    }
    *registers_->write_valid = 0;
    return true;
}

bool Host::read_register(std::uint32_t word, std::uint32_t* value) {
    if (!registers_) return false;
    while (!*registers_->write_ready) cycle();  // a commit is checked
    *registers_->read_word = static_cast<std::uint16_t>(word);
    cycle();
    *value = *registers_->read_data;
    return true;
}

// Moves on to what lies between the next two fences; false when the program is over.
bool Host::next_segment() {
    std::size_t begin = segment_end_;
    while (begin < operation_count_ && operations_[begin].kind == Kind::kFence) begin++;
    if (begin == operation_count_) return false;
    std::size_t end = begin;
    if (operations_[begin].kind == Kind::kPoll) {
        poll_ = &operations_[begin];
        poll_started_ = poll_next_ = cycles_;
        end++;
    } else {
        while (end < operation_count_ && operations_[end].kind != Kind::kFence &&
               operations_[end].kind != Kind::kPoll) {
            end++;
        }
    }
    segment_end_ = end;
    reads_ = writes_ = {poll_ ? end : begin, 0};
    last_progress_ = cycles_;
    return true;
}

// Whether the segment has lines of that kind left; leaves the cursor at the next one.
bool Host::pending(Cursor& cursor, Kind kind) const {
    while (cursor.operation < segment_end_) {
        const Operation& operation = operations_[cursor.operation];
        if (operation.kind == kind && cursor.line < operation.count) return true;
        cursor = {cursor.operation + 1, 0};
    }
    return false;
}

void Host::cycle() {
    events_.set_cycle(cycles_);
    for (Lane& lane : lanes_) {
        offer_messages(lane);
        *lane.port.s2m_ndr_ready = !chance(disturbance_.backpressure);
        *lane.port.s2m_drs_ready = !chance(disturbance_.backpressure);
    }
    evaluate(false);
    std::array<bool, kPorts> read_taken;
    std::array<bool, kPorts> write_taken;
    for (std::size_t i = 0; i < kPorts; i++) {
        Lane& lane = lanes_[i];
        const Port& port = lane.port;
        read_taken[i] = *port.m2s_req_valid && *port.m2s_req_ready;
        write_taken[i] = *port.m2s_rwd_valid && *port.m2s_rwd_ready;
        if (read_taken[i]) note(lane, kReq, extract(port.m2s_req_payload, messages::kReqTag));
        if (write_taken[i]) note(lane, kRwd, extract(port.m2s_rwd_payload, messages::kRwdTag));
        if (disturbance_.backpressure) check_stability(lane);
        if (*port.s2m_ndr_valid && *port.s2m_ndr_ready) take_completion(lane);
        if (*port.s2m_drs_valid && *port.s2m_drs_ready) take_data(lane);
    }
    evaluate(true);
    if (failure_.raised()) fail(Status::kBroken, failure_.message());
    for (std::size_t i = 0; i < kPorts; i++) {
        if (read_taken[i]) *lanes_[i].port.m2s_req_valid = 0;
        if (write_taken[i]) *lanes_[i].port.m2s_rwd_valid = 0;
        if (read_taken[i] || write_taken[i]) last_progress_ = cycles_;
        if (write_taken[i]) link_bytes_ += kLineBytes;
    }
    cycles_++;
}

void Host::evaluate(bool clock) {
    top_->clk = clock;
    top_->eval();
    context_->timeInc(1);
#if VM_TRACE
    if (wave_) wave_->dump(context_->time());
#endif
}

// Offers the next read and the next write at a port where the last one was taken.
void Host::offer_messages(Lane& lane) {
    if (!*lane.port.m2s_req_valid && !lane.free_tags.empty() && (poll_is_due() || pending(reads_, Kind::kRead)) &&
        !chance(disturbance_.idle)) {
        send_read(lane);
    }
    if (!*lane.port.m2s_rwd_valid && !lane.free_tags.empty() && pending(writes_, Kind::kWrite) &&
        !chance(disturbance_.idle)) {
        send_write(lane);
    }
}

bool Host::poll_is_due() const { return poll_ && under_way_ == 0 && cycles_ >= poll_next_; }

void Host::send_read(Lane& lane) {
    std::uint64_t address;
    std::uint32_t tag;
    if (poll_) {
        address = poll_->address;
        tag = take_tag(lane, poll_, 0);
    } else {
        const Operation& operation = operations_[reads_.operation];
        address = operation.addresses[reads_.line];
        tag = take_tag(lane, &operation, reads_.line);
        reads_.line++;
    }
    std::uint32_t* message = lane.port.m2s_req_payload;
    std::fill(message, message + messages::kReqWords, 0);
    insert(message, messages::kReqValid, 1);
    insert(message, messages::kReqOpcode, messages::kMemRd);
    insert(message, messages::kReqMetaField, messages::kMetaNoOp);
    insert(message, messages::kReqTag, tag);
    insert(message, messages::kReqAddress, address / kLineBytes);
    const Outstanding& access = lane.outstanding[tag];
    insert(message, messages::kReqLdId, ld_id_of(*access.operation, access.line));
    *lane.port.m2s_req_valid = 1;
}

void Host::send_write(Lane& lane) {
    const Operation& operation = operations_[writes_.operation];
    const std::uint64_t line = writes_.line++;
    const std::uint64_t enable = operation.enables ? operation.enables[line] : ~std::uint64_t{0};
    std::array<std::uint32_t, kLineWords> data;
    std::memcpy(data.data(), operation.data + line * kLineBytes, kLineBytes);
    std::uint32_t* message = lane.port.m2s_rwd_payload;
    std::fill(message, message + messages::kRwdWords, 0);
    insert(message, messages::kRwdValid, 1);
    insert(message, messages::kRwdOpcode, operation.enables ? messages::kMemWrPtl : messages::kMemWr);
    insert(message, messages::kRwdMetaField, messages::kMetaNoOp);
    insert(message, messages::kRwdTag, take_tag(lane, &operation, line));
    insert(message, messages::kRwdAddress, operation.addresses[line] / kLineBytes);
    insert(message, messages::kRwdLdId, ld_id_of(operation, line));
    insert(message, messages::kRwdPoison, operation.poison);
    insert(message, messages::kRwdEnable, enable);
    insert_words(message, messages::kRwdData, data.data(), kLineWords);
    *lane.port.m2s_rwd_valid = 1;
}

std::uint32_t Host::take_tag(Lane& lane, const Operation* operation, std::uint64_t line) {
    const std::uint32_t tag = lane.free_tags.back();
    lane.free_tags.pop_back();
    lane.outstanding[tag] = {operation, line};
    under_way_++;
    return tag;
}

// The LD-ID of a line's messages.
std::uint64_t Host::ld_id_of(const Operation& operation, std::uint64_t line) {
    if (operation.kind == Kind::kPoll) return operation.ld_id;
    return operation.ld_ids ? operation.ld_ids[line] : 0;
}

// Records a message of the access that has a tag.
void Host::note(const Lane& lane, Stream stream, std::uint64_t tag) {
    const Outstanding& access = lane.outstanding[tag];
    const Operation& operation = *access.operation;
    const bool polls = operation.kind == Kind::kPoll;
    events_.record(lane.sources[stream], EventKind::kLink, polls ? operation.address : operation.addresses[access.line],
                   tag);
}

void Host::take_completion(Lane& lane) {
    const std::uint64_t tag = extract(lane.port.s2m_ndr_payload, messages::kNdrTag);
    const std::uint64_t ld_id = extract(lane.port.s2m_ndr_payload, messages::kNdrLdId);
    if (Outstanding* access = answered(lane, tag, ld_id, true)) access->operation = nullptr;
}

void Host::take_data(Lane& lane) {
    const std::uint32_t* message = lane.port.s2m_drs_payload;
    Outstanding* answer = answered(lane, extract(message, messages::kDrsTag), extract(message, messages::kDrsLdId), false);
    if (!answer) return;
    link_bytes_ += kLineBytes;
    Access access = Access::kData;
    if (extract(message, messages::kDrsOpcode) == messages::kMemDataNxm) {
        access = Access::kOutside;
    } else if (extract(message, messages::kDrsPoison)) {
        access = Access::kPoison;
    }
    std::array<std::uint32_t, kLineWords> data{};
    if (access != Access::kOutside) extract_words(message, messages::kDrsData, data.data(), kLineWords);
    const Outstanding done = *answer;
    answer->operation = nullptr;
    if (done.operation->kind == Kind::kPoll) {
        end_poll(data.data(), access);
    } else {
        std::memcpy(done.operation->data + done.line * kLineBytes, data.data(), kLineBytes);
        done.operation->access[done.line] = access;
    }
}

// Looks at what a poll read: it has ended, in time or not, or asks again a little later.
void Host::end_poll(const std::uint32_t* data, Access access) {
    const std::uint64_t waited = cycles_ - poll_started_;
    const std::uint64_t found = extract(data, {0, 64});
    if (access != Access::kData) {
        fail(Status::kTimeout, describe(access == Access::kPoison ? "the line at %#" PRIx64 " is poisoned"
                                                                  : "there is no memory at %#" PRIx64,
                                        poll_->address));
    } else if ((found & poll_->mask) == poll_->value) {
        poll_ = nullptr;
    } else if (waited >= poll_->timeout_cycles) {
        fail(Status::kTimeout,
             describe("the line at %#" PRIx64 " did not change within %" PRIu64 " cycles", poll_->address, waited));
    } else {
        poll_next_ = cycles_ + std::min(kPollGapCycles, waited / 8);
    }
}

// The access that a message answers, its tag free again; null, and the host broken, where there is none.
Host::Outstanding* Host::answered(Lane& lane, std::uint64_t tag, std::uint64_t ld_id, bool write) {
    Outstanding* access = tag < kTags ? &lane.outstanding[tag] : nullptr;
    if (!access || !access->operation || (access->operation->kind == Kind::kWrite) != write) {
        fail(Status::kBroken, describe(write ? "completion with tag %#" PRIx64 ", which no write awaits"
                                             : "data with tag %#" PRIx64 ", which no read awaits",
                                       tag));
        return nullptr;
    }
    if (ld_id != ld_id_of(*access->operation, access->line)) {
        fail(Status::kBroken, describe("the answer with tag %#" PRIx64 " has LD-ID %" PRIu64 ", not its message's",
                                       tag, ld_id));
        return nullptr;
    }
    note(lane, write ? kNdr : kDrs, tag);
    lane.free_tags.push_back(static_cast<std::uint32_t>(tag));
    under_way_--;
    last_progress_ = cycles_;
    return access;
}

// Once valid, the device must hold its message until it is taken.
void Host::check_stability(Lane& lane) {
    const Port& port = lane.port;
    const std::uint32_t* drs = port.s2m_drs_payload;
    if (lane.ndr_held && !(*port.s2m_ndr_valid && *port.s2m_ndr_payload == lane.held_ndr)) {
        fail(Status::kBroken, "s2m_ndr changed before it was taken");
    }
    if (lane.drs_held && !(*port.s2m_drs_valid && std::equal(lane.held_drs.begin(), lane.held_drs.end(), drs))) {
        fail(Status::kBroken, "s2m_drs changed before it was taken");
    }
    lane.ndr_held = *port.s2m_ndr_valid && !*port.s2m_ndr_ready;
    lane.drs_held = *port.s2m_drs_valid && !*port.s2m_drs_ready;
    lane.held_ndr = *port.s2m_ndr_payload;
    std::copy(drs, drs + lane.held_drs.size(), lane.held_drs.begin());
}

bool Host::chance(std::uint32_t probability) {
    if (probability == 0) return false;
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<std::uint32_t>(random_ >> 32) < probability;
}

void Host::fail(Status status, std::string message) {
    poll_ = nullptr;
    status_ = status;
    message_ = std::move(message);
}

}  // namespace nearkv

// What nearkv_sim/rtl.py calls.
#pragma GCC visibility push(default)
extern "C" {

void* nearkv_open(std::uint32_t idle, std::uint32_t backpressure, std::uint64_t seed) {
    return new nearkv::Host({idle, backpressure, seed});
}

void nearkv_start(nearkv::Host* host, const nearkv::Operation* operations, std::uint64_t count) {
    host->start(operations, count);
}

int nearkv_advance(nearkv::Host* host, std::uint64_t cycles) {
    return static_cast<int>(host->advance(cycles));
}

const char* nearkv_message(const nearkv::Host* host) {
    return host->message().c_str();
}

std::uint64_t nearkv_cycles(const nearkv::Host* host) { return host->cycles(); }

std::uint64_t nearkv_link_bytes(const nearkv::Host* host) { return host->link_bytes(); }

nearkv::Events* nearkv_events(nearkv::Host* host) { return &host->events(); }

int nearkv_start_wave(nearkv::Host* host, const char* path) {
    return host->start_wave(path) ? 0 : -1;
}

int nearkv_write_register(nearkv::Host* host, std::uint32_t word, std::uint32_t value) {
    return host->write_register(word, value) ? 0 : -1;
}

int nearkv_read_register(nearkv::Host* host, std::uint32_t word, std::uint32_t* value) {
    return host->read_register(word, value) ? 0 : -1;
}

void nearkv_close(nearkv::Host* host) { delete host; }
}
#pragma GCC visibility pop
