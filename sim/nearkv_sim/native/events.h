// What happened in a device, and in which cycle: the RTL and the host append, Python takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace nearkv {

// What an event tells. Sources are named by what happens and where: "unit.first.0" (nearkv_hw/timeline.py has all of
// these), "dram.CHANNEL.SUBCHANNEL", "link.m2s_req". Of the DRAM's commands `a` is the bank, of a refresh the set of
// banks, and `b` the row or column.
enum class EventKind : std::uint32_t {
    kStage = 0,  // a signal of the RTL, from nearkv_event.sv
    kActivate = 1,
    kRead = 2,
    kWrite = 3,
    kPrecharge = 4,
    kPrechargeAll = 5,
    kRefresh = 6,
    kRefreshSet = 7,
    kLink = 8,  // a message: `a` its host address, `b` its tag
};

// Laid out as `EVENT` in nearkv_sim/events.py.
struct Event {
    std::uint64_t cycle;
    std::uint32_t source;
    EventKind kind;
    std::uint64_t a;
    std::uint64_t b;
};

// The recorder of one device. While it does not record, an event costs a test of a flag.
class Events {
public:
    // Makes a recorder the one to which everything that is built on this thread belongs, until the end of the scope.
    class Scope {
    public:
        explicit Scope(Events& events);
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
        ~Scope();

    private:
        Events* outer_;
    };

    Events() = default;
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    // The recorder of the device that is being built on this thread; null where nobody will ask for events.
    static Events* current();

    // Names a place where events happen; what `record` wants to know it by.
    std::uint32_t source(std::string name);
    // A source's name; null for a number that `source` never returned.
    const char* name(std::uint32_t source) const;

    // Forgets all events and records the next `capacity` ones of the kinds whose bit is set.
    void start(std::size_t capacity, std::uint32_t kinds);
    // Records no more.
    void stop() { kinds_ = 0; }
    // The cycle of the events to come.
    void set_cycle(std::uint64_t cycle) { cycle_ = cycle; }
    void record(std::uint32_t source, EventKind kind, std::uint64_t a, std::uint64_t b) {
        if (kinds_ >> static_cast<unsigned>(kind) & 1) append({cycle_, source, kind, a, b});
    }

    std::size_t count() const { return count_; }
    // Events that came when there was no room left.
    std::uint64_t lost() const { return lost_; }
    // Moves all events to `events`, which has room for `count()`.
    void take(Event* events);

private:
    void append(const Event& event);

    std::uint32_t kinds_ = 0;
    std::uint64_t cycle_ = 0;
    std::uint64_t lost_ = 0;
    std::size_t count_ = 0;
    std::size_t capacity_ = 0;
    std::vector<std::unique_ptr<Event[]>> pieces_;
    std::deque<std::string> names_;
};

}  // namespace nearkv
