// Exercises events.cpp against a plain list; built with the sanitizers by test_events.py. Exits non-zero on a difference.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "events.h"

extern "C" {
void* nearkv_event_open(const char* name, int index);
void nearkv_event_close(void* tap);
void nearkv_event_record(void* tap, unsigned a, unsigned b);
}

namespace {

using nearkv::Event;
using nearkv::EventKind;
using nearkv::Events;

bool same(const Event& one, const Event& other) {
    return one.cycle == other.cycle && one.source == other.source && one.kind == other.kind && one.a == other.a &&
           one.b == other.b;
}

bool check(bool good, const char* what) {
    if (!good) std::printf("%s\n", what);
    return good;
}

// Records at random, in rounds; every round must bring back what a list has.
bool rounds(std::mt19937_64& random) {
    Events events;
    const std::uint32_t first = events.source("one");
    const std::uint32_t second = events.source("two");
    if (!check(std::string(events.name(first)) == "one" && std::string(events.name(second)) == "two", "names")) return false;
    if (!check(events.name(2) == nullptr, "a name without a source")) return false;
    std::uint64_t cycle = 0;
    for (int round = 0; round < 4; round++) {
        const std::size_t capacity = 1 + random() % 200000;
        const auto kinds = static_cast<std::uint32_t>(random() % 512);
        std::vector<Event> expected;
        std::uint64_t lost = 0;
        events.start(capacity, kinds);
        for (int step = 0; step < 150000; step++) {
            if (random() % 2) events.set_cycle(++cycle);
            const auto kind = static_cast<EventKind>(random() % 9);
            const Event event{cycle, random() % 2 ? first : second, kind, random(), random()};
            events.record(event.source, event.kind, event.a, event.b);
            if (!(kinds >> static_cast<unsigned>(kind) & 1)) continue;
            if (expected.size() < capacity) {
                expected.push_back(event);
            } else {
                lost++;
            }
        }
        events.stop();
        events.record(first, EventKind::kStage, 1, 2);
        if (!check(events.count() == expected.size() && events.lost() == lost, "counts")) return false;
        std::vector<Event> taken(expected.size());
        events.take(taken.data());
        for (std::size_t i = 0; i < taken.size(); i++) {
            if (!check(same(taken[i], expected[i]), "an event")) return false;
        }
        if (!check(events.count() == 0, "events taken twice")) return false;
    }
    return true;
}

// Taps belong to the recorder in whose scope they were opened, and to none outside of all scopes.
bool scopes() {
    Events outer, inner;
    void* nobody = nearkv_event_open("tap", 0);
    if (!check(nobody == nullptr && Events::current() == nullptr, "a recorder outside of scopes")) return false;
    nearkv_event_record(nobody, 1, 2);
    const Events::Scope outer_scope(outer);
    void* before = nearkv_event_open("tap", 1);
    void* within = nullptr;
    {
        const Events::Scope inner_scope(inner);
        within = nearkv_event_open("tap", 2);
    }
    if (!check(Events::current() == &outer, "the outer scope again")) return false;
    outer.start(10, ~0u);
    inner.start(10, ~0u);
    nearkv_event_record(before, 3, 4);
    nearkv_event_record(within, 5, 6);
    Event one, other;
    const bool counts = check(outer.count() == 1 && inner.count() == 1, "events of scopes");
    if (counts) {
        outer.take(&one);
        inner.take(&other);
    }
    for (void* tap : {nobody, before, within}) nearkv_event_close(tap);
    return counts && check(one.a == 3 && one.b == 4 && other.a == 5 && other.b == 6, "values") &&
           check(std::string(inner.name(other.source)) == "tap.2", "a tap's name");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
    return rounds(random) && scopes() ? 0 : 1;
}
