// How a black box tells the host that the design broke a rule, which ends the simulation.
#pragma once

#include <string>
#include <utility>

namespace nearkv {

// What was broken first in one device. A black box that finds no recorder stops the simulator itself.
class Failure {
public:
    // Makes a failure the one of everything that is built on this thread, until the end of the scope.
    class Scope {
    public:
        explicit Scope(Failure& failure) : outer_(std::exchange(current_, &failure)) {}
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
        ~Scope() { current_ = outer_; }

    private:
        Failure* outer_;
    };

    Failure() = default;
    Failure(const Failure&) = delete;
    Failure& operator=(const Failure&) = delete;

    // The failure of the device that is being built on this thread; null where nobody takes it.
    static Failure* current() { return current_; }

    void raise(std::string message) {
        if (raised_) return;
        raised_ = true;
        message_ = std::move(message);
    }
    bool raised() const { return raised_; }
    const std::string& message() const { return message_; }

private:
    static inline thread_local Failure* current_ = nullptr;

    bool raised_ = false;
    std::string message_;
};

}  // namespace nearkv
