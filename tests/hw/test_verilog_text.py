"""Text for Verilator: parts put together, copies counted, and nothing touched whose meaning could change."""

import pytest
from nearkv_hw.verilog_text import tidy


def module(*lines, declared="  wire [3:0] \\a.b ;\n  wire [7:0] \\$1 ;\n  input [7:0] x;\n"):
    return f"module \\top.m (x);\n{declared}" + "".join(f"  {line}\n" for line in lines) + "endmodule\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("assign y = { x, x, x };", "assign y = {3{x}};"),
        ("assign y = { x[3], x[3], x };", "assign y = { {2{x[3]}}, x };"),
        ("assign y = a + { \\$1 , \\$1 , 1'h0, 1'h0 };", "assign y = a + { {2{\\$1 }}, {2{1'h0}} };"),
        ("assign y = { x[3], x[2] };", "assign y = { x[3], x[2] };"),
    ],
)
def test_copies_are_counted(before, after):
    assert tidy(module(before)) == module(after)


def test_parts_are_joined_where_the_first_one_stood():
    before = module(
        "assign \\$1 [0] = x[7];",
        "assign y = 1'h1;",
        "assign \\$1 [7:2] = { x[2:0], \\a.b [2:0] };",
        "assign \\$1 [1] = 1'h0;",
    )
    assert tidy(before) == module("assign \\$1  = { x[2:0], \\a.b [2:0], 1'h0, x[7] };", "assign y = 1'h1;")


@pytest.mark.parametrize(
    "lines",
    [
        ("assign \\a.b [3:1] = x[3:1];",),  # a bit is driven elsewhere
        ("assign \\a.b [2:0] = x[2:0];",),
        ("assign \\a.b [3:2] = x[1:0];", "assign \\a.b [0] = x[1];"),
        ("assign \\a.b [3:2] = x[1:0] + x[3:2];", "assign \\a.b [1:0] = x[1:0];"),  # would have another width
        ("assign \\a.b [3:2] = x[1:0];", "assign \\a.b [2:0] = x[2:0];"),
        ("assign \\a.b[3]  = x[1];", "assign \\a.b[2:0]  = x[1];"),  # these brackets belong to names
    ],
)
def test_what_could_change_its_meaning_stays(lines):
    assert tidy(module(*lines)) == module(*lines)


def test_names_of_one_module_are_not_those_of_another():
    parts = ("assign \\$1 [7:4] = x[3:0];", "assign \\$1 [3:0] = x[3:0];")
    joined = "assign \\$1  = { x[3:0], x[3:0] };"
    other = module(*parts, declared="  wire [8:0] \\$1 ;\n")
    assert tidy(module(*parts) + other) == module(joined.replace("{ x[3:0], x[3:0] }", "{2{x[3:0]}}")) + other


def memory(*words):
    return module("initial begin", *(f"  {word}" for word in words), "end")


def test_memories_are_filled_by_loops():
    words = [f"\\m.n [{n}] = 4'h{n // 10 + 1};" for n in range(22)]
    looped = module(
        "initial begin : fill_0",
        "  integer n;",
        "  for (n = 0; n <= 9; n = n + 1) \\m.n [n] = 4'h1;",
        "  for (n = 10; n <= 19; n = n + 1) \\m.n [n] = 4'h2;",
        "  \\m.n [20] = 4'h3;",
        "  \\m.n [21] = 4'h3;",
        "end",
    )
    assert tidy(memory(*words)) == looped
    assert tidy(memory(*words) + memory(*words)) == looped + looped


@pytest.mark.parametrize(
    "words",
    [
        [f"m[{n}] = 4'h0;" for n in range(7)],
        [f"m[{2 * n}] = 4'h0;" for n in range(20)],
        [f"m[{n}] = 4'h{n % 2};" for n in range(20)],
        [f"m{n}[{n}] = 4'h0;" for n in range(20)],
        [f"m[{n}] = x[{n}];" for n in range(20)],
    ],
)
def test_words_that_no_loop_can_stand_for_stay(words):
    assert tidy(memory(*words)) == memory(*words)
