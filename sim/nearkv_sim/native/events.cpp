#include "events.h"

#include <algorithm>
#include <utility>

namespace nearkv {
namespace {

constexpr std::size_t kPieceEvents = std::size_t{1} << 16;

thread_local Events* current_events = nullptr;

// A source that the RTL made.
struct Tap {
    Events* events;
    std::uint32_t source;
};

}  // namespace

Events::Scope::Scope(Events& events) : outer_(std::exchange(current_events, &events)) {}

Events::Scope::~Scope() { current_events = outer_; }

Events* Events::current() { return current_events; }

std::uint32_t Events::source(std::string name) {
    names_.push_back(std::move(name));
    return static_cast<std::uint32_t>(names_.size() - 1);
}

const char* Events::name(std::uint32_t source) const {
    return source < names_.size() ? names_[source].c_str() : nullptr;
}

void Events::start(std::size_t capacity, std::uint32_t kinds) {
    pieces_.clear();
    count_ = 0;
    lost_ = 0;
    capacity_ = capacity;
    kinds_ = kinds;
}

void Events::append(const Event& event) {
    if (count_ == capacity_) {
        lost_++;
        return;
    }
    if (count_ % kPieceEvents == 0) pieces_.push_back(std::make_unique<Event[]>(kPieceEvents));
    pieces_.back()[count_++ % kPieceEvents] = event;
}

void Events::take(Event* events) {
    for (const auto& piece : pieces_) {
        const std::size_t events_left = std::min(count_, kPieceEvents);
        events = std::copy_n(piece.get(), events_left, events);
        count_ -= events_left;
    }
    pieces_.clear();
}

}  // namespace nearkv

// What nearkv_event.sv imports.
extern "C" {

void* nearkv_event_open(const char* name, int index) {
    nearkv::Events* events = nearkv::Events::current();
    if (!events) return nullptr;
    return new nearkv::Tap{events, events->source(std::string(name) + "." + std::to_string(index))};
}

void nearkv_event_close(void* tap) { delete static_cast<nearkv::Tap*>(tap); }

void nearkv_event_record(void* tap, unsigned a, unsigned b) {
    if (!tap) return;
    const auto* known = static_cast<const nearkv::Tap*>(tap);
    known->events->record(known->source, nearkv::EventKind::kStage, a, b);
}
}

// What nearkv_sim/rtl.py calls; nearkv_events (host.cpp) finds a device's recorder.
#pragma GCC visibility push(default)
extern "C" {

void nearkv_events_start(nearkv::Events* events, std::uint64_t capacity, std::uint32_t kinds) {
    events->start(capacity, kinds);
}

void nearkv_events_stop(nearkv::Events* events) { events->stop(); }

std::uint64_t nearkv_events_count(const nearkv::Events* events) { return events->count(); }

std::uint64_t nearkv_events_lost(const nearkv::Events* events) { return events->lost(); }

void nearkv_events_take(nearkv::Events* events, nearkv::Event* taken) { events->take(taken); }

const char* nearkv_events_name(const nearkv::Events* events, std::uint32_t source) { return events->name(source); }
}
#pragma GCC visibility pop
