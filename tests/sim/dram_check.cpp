// Breaks every rule of dram.cpp by one cycle of the command clock, and keeps it by none; built with the sanitizers by
// test_dram_model.py. Input, a line each: a case. Output, a line each: what was broken, or nothing.
//
// A case: the rules, then after a semicolon each its commands, told at a device cycle: "ACT cycle odd bank row",
// "ACT_LATE cycle odd bank row", "PRE cycle odd bank" (bank -1: all), "REF cycle odd set" (set -1: all),
// "RD cycle odd bank column", "WR cycle odd bank column".
#include <array>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

#include "dram.h"

namespace {

void carry_out(nearkv::Dram& dram, const std::string& text) {
    std::istringstream words(text);
    std::string command;
    std::int64_t cycle = 0, odd = 0, where = 0, which = 0;
    words >> command >> cycle >> odd >> where >> which;
    const bool all = where < 0;
    const auto first = all ? 0 : static_cast<unsigned>(where);
    const auto second = static_cast<unsigned>(which);
    if (command == "ACT" || command == "ACT_LATE") {
        dram.activate(cycle, odd != 0, command == "ACT_LATE", first, second);
    } else if (command == "PRE") {
        dram.precharge(cycle, odd != 0, all, first);
    } else if (command == "REF") {
        dram.refresh(cycle, odd != 0, all, first);
    } else if (command == "RD") {
        dram.read(cycle, odd != 0, first, second);
        dram.take();
    } else if (command == "WR") {
        const std::array<std::uint32_t, 16> data{};
        dram.write(cycle, odd != 0, first, second, data.data(), 0, false);
    }
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream parts(line);
        std::string part;
        std::getline(parts, part, ';');
        nearkv::Failure failure;
        const nearkv::Failure::Scope scope(failure);
        nearkv::Dram dram(7, 1, "PART", part);
        while (std::getline(parts, part, ';')) carry_out(dram, part);
        if (failure.raised() == dram.violation().empty() || failure.message() != dram.violation()) return 1;
        if (dram.must_stop()) return 1;
        std::puts(dram.violation().c_str());
    }
    return 0;
}
