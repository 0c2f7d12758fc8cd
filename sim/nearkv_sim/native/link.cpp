// Traffic through a link: random messages at both ends, a wire with errors, and a check of every message that
// arrives. nearkv_sim/link.py says what the options and results mean.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "Vtop.h"
#include "bits.h"
#include "link_abi.h"
#include "verilated.h"

namespace nearkv {
namespace {

constexpr std::uint64_t kStallCycles = 400'000;
constexpr std::size_t kWords = 21;  // of the widest message
constexpr std::size_t kLostWords = std::size(kReqLost);
using Message = std::array<std::uint32_t, kWords>;

class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u | 1) {}
    std::uint32_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return static_cast<std::uint32_t>(state_ >> 32);
    }
    bool chance(std::uint32_t probability) { return probability != 0 && next() < probability; }

private:
    std::uint64_t state_;
};

// One kind of message: the stream into the link and the one out of it.
struct Channel {
    std::uint32_t* in_payload;
    std::uint8_t* in_valid;
    const std::uint8_t* in_ready;
    const std::uint32_t* out_payload;
    const std::uint8_t* out_valid;
    std::uint8_t* out_ready;
    unsigned bits;
    const std::uint32_t* lost;  // bits of the header that do not cross the link

    std::deque<Message> to_send;  // answers that wait
    std::deque<std::uint64_t> send_since;
    std::deque<Message> under_way;
    std::deque<std::uint64_t> since;
    Message held{};
    bool holds = false;

    std::size_t words() const { return (bits + 31) / 32; }
};

class Run {
public:
    Run(const LinkOptions& options, LinkResults& results) : options_(options), results_(results), random_(options.seed) {
        context_ = std::make_unique<VerilatedContext>();
        top_ = std::make_unique<Vtop>(context_.get());
        channels_ = {
            Channel{top_->host_m2s_req_payload.data(), &top_->host_m2s_req_valid, &top_->host_m2s_req_ready,
                    top_->device_m2s_req_payload.data(), &top_->device_m2s_req_valid, &top_->device_m2s_req_ready,
                    kReqBits, kReqLost, {}, {}, {}, {}},
            Channel{top_->host_m2s_rwd_payload.data(), &top_->host_m2s_rwd_valid, &top_->host_m2s_rwd_ready,
                    top_->device_m2s_rwd_payload.data(), &top_->device_m2s_rwd_valid, &top_->device_m2s_rwd_ready,
                    kRwdBits, kRwdLost, {}, {}, {}, {}},
            Channel{&top_->device_s2m_ndr_payload, &top_->device_s2m_ndr_valid, &top_->device_s2m_ndr_ready,
                    &top_->host_s2m_ndr_payload, &top_->host_s2m_ndr_valid, &top_->host_s2m_ndr_ready, kNdrBits, kNdrLost,
                    {}, {}, {}, {}},
            Channel{top_->device_s2m_drs_payload.data(), &top_->device_s2m_drs_valid, &top_->device_s2m_drs_ready,
                    top_->host_s2m_drs_payload.data(), &top_->host_s2m_drs_valid, &top_->host_s2m_drs_ready, kDrsBits, kDrsLost,
                    {}, {}, {}, {}},
        };
    }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    ~Run() { top_->final(); }

    std::string go() {
        top_->rst = 1;
        for (int i = 0; i < 4; i++) tick();
        top_->rst = 0;
        while (message_.empty() && !done()) cycle();
        results_.cycles = cycles_;
        return message_;
    }

private:
    static constexpr std::size_t kReq = 0, kRwd = 1, kNdr = 2, kDrs = 3;

    bool done() const {
        return created_ >= options_.messages &&
               std::all_of(channels_.begin(), channels_.end(), [](const Channel& channel) {
                   return channel.under_way.empty() && channel.to_send.empty() && !*channel.in_valid;
               });
    }

    void tick() {
        top_->clk = 0;
        top_->eval();
        top_->clk = 1;
        top_->eval();
    }

    void cycle() {
        for (std::size_t kind = 0; kind < channels_.size(); kind++) {
            Channel& channel = channels_[kind];
            if (!*channel.in_valid) offer(kind, channel);
            *channel.out_ready = !random_.chance(options_.backpressure[kind]);
        }
        std::array<std::uint32_t, 2> noise;
        for (std::size_t wire = 0; wire < 2; wire++) noise[wire] = make_noise();
        top_->noise_0 = static_cast<std::uint16_t>(noise[0]);
        top_->noise_1 = static_cast<std::uint16_t>(noise[1]);
        top_->clk = 0;
        top_->eval();
        observe(noise);
        std::array<bool, 4> taken;
        for (std::size_t kind = 0; kind < channels_.size(); kind++) {
            Channel& channel = channels_[kind];
            taken[kind] = *channel.in_valid && *channel.in_ready;
            if (taken[kind]) {
                results_.sent[kind]++;
                last_progress_ = cycles_;
            }
            receive(kind, channel);
        }
        top_->clk = 1;
        top_->eval();
        for (std::size_t kind = 0; kind < channels_.size(); kind++) {
            if (taken[kind]) *channels_[kind].in_valid = 0;
        }
        if (cycles_ - last_progress_ > kStallCycles) fail("nothing moved for " + std::to_string(kStallCycles) + " cycles");
        cycles_++;
    }

    // Puts the next message of a kind at the link's door, if there is one and chance lets it.
    void offer(std::size_t kind, Channel& channel) {
        const bool answer = options_.answering && (kind == kNdr || kind == kDrs);
        if (answer ? channel.to_send.empty() : created_ >= options_.messages) return;
        if (random_.chance(options_.idle[kind])) return;
        Message message{};
        std::uint64_t since = cycles_;
        if (answer) {
            message = channel.to_send.front();
            since = channel.send_since.front();
            channel.to_send.pop_front();
            channel.send_since.pop_front();
        } else {
            message = make(kind, channel);
            created_++;
        }
        std::copy_n(message.begin(), channel.words(), channel.in_payload);
        *channel.in_valid = 1;
        channel.under_way.push_back(message);
        channel.since.push_back(since);
    }

    Message make(std::size_t kind, const Channel& channel) {
        Message message{};
        for (std::size_t i = 0; i < channel.words(); i++) message[i] = random_.next();
        message[0] |= 1;  // valid
        if (kind == kRwd && random_.chance(options_.full)) {
            for (unsigned bit = kRwdEnable; bit < kRwdEnable + 64; bit++) message[bit / 32] |= 1u << bit % 32;
        }
        for (std::size_t i = 0; i < kLostWords && i < channel.words(); i++) message[i] &= ~channel.lost[i];
        if (channel.bits % 32) message[channel.words() - 1] &= (1u << channel.bits % 32) - 1;
        return message;
    }

    std::uint32_t make_noise() {
        std::uint32_t noise = 0;
        if (random_.chance(options_.flip)) noise |= 1 | random_.next() % kWireBits << 1;
        if (random_.chance(options_.drop)) noise |= 1u << 11;
        if (random_.chance(options_.repeat)) noise |= 1u << 12;
        return noise;
    }

    // Counts what flits did, and how long retries take.
    void observe(const std::array<std::uint32_t, 2>& noise) {
        for (std::size_t wire = 0; wire < 2; wire++) {
            if (!(top_->passed >> wire & 1)) continue;
            passed_[wire]++;
            results_.flits[wire] = passed_[wire] / kBeats;
            results_.flipped += noise[wire] & 1;
            results_.dropped += noise[wire] >> 11 & 1;
            results_.repeated += (noise[wire] >> 11 & 3) == 2;
        }
        results_.retrainings += was_up_ && !top_->up;
        was_up_ = top_->up;
        const std::array<bool, 2> replayed{top_->host_replayed != 0, top_->device_replayed != 0};
        const std::array<bool, 2> accepted{top_->device_accepted != 0, top_->host_accepted != 0};
        const std::array<std::uint8_t, 2> states{top_->device_state, top_->host_state};
        const std::array<bool, 2> errors{top_->device_crc_error != 0, top_->host_crc_error != 0};
        for (std::size_t wire = 0; wire < 2; wire++) {
            results_.replayed[wire] += replayed[wire];
            results_.accepted[wire] += accepted[wire];
            results_.crc_errors[wire] += errors[wire];
            const bool normal = states[wire] == kRetryNormal;
            if (states[wire] == kRetryAbort) fail("a link layer gave up");
            if (!normal && !recovering_[wire]) {
                recovering_[wire] = true;
                recovery_since_[wire] = cycles_;
            } else if (normal && recovering_[wire] && accepted[wire]) {
                recovering_[wire] = false;
                const std::uint64_t took = cycles_ - recovery_since_[wire];
                results_.recoveries++;
                results_.recovery_cycles += took;
                results_.longest_recovery = std::max(results_.longest_recovery, took);
            }
        }
        if (top_->broken) fail("a link layer found a rule broken");
    }

    void receive(std::size_t kind, Channel& channel) {
        if (!*channel.out_valid) {
            if (channel.holds) fail("a message was withdrawn");
            return;
        }
        if (channel.holds && !std::equal(channel.held.begin(), channel.held.begin() + channel.words(), channel.out_payload)) {
            fail("a message changed before it was taken");
        }
        std::copy_n(channel.out_payload, channel.words(), channel.held.begin());
        channel.holds = !*channel.out_ready;
        if (channel.holds) return;
        last_progress_ = cycles_;
        if (channel.under_way.empty()) return fail("a message that nobody sent, kind " + std::to_string(kind));
        const Message& expected = channel.under_way.front();
        if (!std::equal(expected.begin(), expected.begin() + channel.words(), channel.out_payload)) {
            return fail("message " + std::to_string(results_.received[kind]) + " of kind " + std::to_string(kind) +
                        " is not what was sent");
        }
        results_.received[kind]++;
        const std::uint64_t since = channel.since.front();
        if (options_.answering && (kind == kReq || kind == kRwd)) {
            Channel& back = channels_[kind == kReq ? kDrs : kNdr];
            back.to_send.push_back(make(kind == kReq ? kDrs : kNdr, back));
            back.send_since.push_back(since);
        } else {
            const std::uint64_t took = cycles_ - since;
            results_.latency_cycles[kind] += took;
            results_.shortest[kind] = results_.shortest[kind] ? std::min(results_.shortest[kind], took) : took;
        }
        channel.under_way.pop_front();
        channel.since.pop_front();
    }

    void fail(const std::string& what) {
        if (message_.empty()) message_ = what + " (cycle " + std::to_string(cycles_) + ")";
    }

    LinkOptions options_;
    LinkResults& results_;
    Random random_;
    std::unique_ptr<VerilatedContext> context_;
    std::unique_ptr<Vtop> top_;
    std::array<Channel, 4> channels_;
    std::uint64_t created_ = 0;
    std::uint64_t cycles_ = 0;
    std::uint64_t last_progress_ = 0;
    std::array<std::uint64_t, 2> passed_{};
    std::array<bool, 2> recovering_{};
    std::array<std::uint64_t, 2> recovery_since_{};
    bool was_up_ = true;
    std::string message_;
};

}  // namespace
}  // namespace nearkv

#pragma GCC visibility push(default)
extern "C" int nearkv_link_run(const nearkv::LinkOptions* options, nearkv::LinkResults* results, char* message,
                               std::size_t room) {
    nearkv::Run run(*options, *results);
    const std::string failure = run.go();
    std::snprintf(message, room, "%s", failure.c_str());
    return failure.empty() ? 0 : -1;
}
#pragma GCC visibility pop
