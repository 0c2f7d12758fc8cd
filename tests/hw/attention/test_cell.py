# amaranth: UnusedElaboratable=no
"""The cell: in score mode a product's bin and limbs under any top, in value mode the lane's exact sums."""

import cocotb
import pytest
from amaranth.hdl import signed
from attention_golden import merge, term
from cocotb.triggers import RisingEdge
from nearkv_hw.abi.numerics import LIMB_BITS
from nearkv_hw.arithmetic.scale import ELEMENT_BIAS, Element
from nearkv_hw.arithmetic.weight import Weight
from nearkv_hw.attention.cell import DOT_BIN_BIAS, DOT_BINS, SUM_BIN_BIAS, Cell
from nearkv_sim.cocotb.payload import pack, unpack
from nearkv_sim.cocotb.runner import parameters, run
from nearkv_sim.cocotb.streams import random, start, value


@pytest.mark.rtl
def test_cell():
    shape = {"query_states": 4, "states": 4}
    run(Cell(**shape), module=__file__, parameters=shape)


def element_term(element, factor, factor_exponent, factor_bits, negative=0):
    """The state of the product of an element and a factor with its leading one at the top."""
    product = element["significand"] * factor
    return term(negative, product, element["exponent"] - 17 + factor_exponent - (factor_bits - 1))


@cocotb.test()
async def multiplies_and_sums_in_both_modes(dut):
    await start(dut)
    rng = random("operations")
    states = parameters()["states"]

    def element(query):
        """A query's element is a bf16 or fp16 number, one of K or V a product with a scale."""
        significand = rng.choice([0, *[rng.randrange(1 << 17, 1 << 18) for _ in range(9)]])
        if query:
            return {"significand": significand >> 7 << 7, "exponent": rng.randint(-133, 127)}
        return {"significand": significand, "exponent": rng.randint(-149, 142)}

    operations = []
    for number in range(6000):
        kind = "load" if number < 8 else rng.choice(["load", "idle", *["score"] * 5, *["value"] * 5])
        if number and operations[-1]["kind"] == "load" and kind == "score":
            kind = "value"  # a score operation leaves a cycle to a load
        operations.append(
            {
                "kind": kind,
                "element": element(kind == "load"),
                "weight": {
                    "significand": rng.choice([0, *[rng.randrange(1 << 17, 1 << 18) for _ in range(9)]]),
                    "exponent": rng.choice([rng.randrange(-40, 40), rng.randrange(-(1 << 23), 1 << 23)]),
                },
                "query_negative": rng.getrandbits(1),
                "drop": rng.choice([0, 0, 0, 1, 2, 3]),
                "query": number % 4 if number < 8 else rng.randrange(4),
                "address": rng.randrange(states),
                "first": int(rng.random() < 0.05),
                "negative": rng.getrandbits(1),
                "above": rng.choice([0, 0, 1, 2]),
            }
        )

    def at(cycle):
        return operations[cycle] if 0 <= cycle < len(operations) else None

    queries, sums = {}, {}
    for operation in operations:  # what each operation must give, in order
        if operation["kind"] == "load":
            queries[operation["query"]] = operation["element"], operation["query_negative"]
        elif operation["kind"] == "score":
            query, negative = queries[operation["query"]]
            factor = 0 if operation["drop"] >> negative & 1 else query["significand"]
            operation["term"] = element_term(operation["element"], factor, query["exponent"], 18)
        elif operation["kind"] == "value":
            address, weight = operation["address"], operation["weight"]
            operation["first"] |= address not in sums
            operation["before"] = None if operation["first"] else sums[address]
            added = element_term(
                operation["element"], weight["significand"], weight["exponent"], 18, operation["negative"]
            )
            sums[address] = merge(operation["before"], added)

    edge = RisingEdge(dut.clk)
    seen = 0
    for cycle in range(-1, len(operations) + Cell.limb_cycles + 1):
        following = at(cycle + 1)
        if following:
            dut.value.value = int(following["kind"] == "value")
            dut.weight.value = pack(Weight, following["weight"])
            dut.query_read.value = following["query"]
            dut.drop.value = following["drop"]
        now = at(cycle)
        if now:
            biased = {**now["element"], "exponent": now["element"]["exponent"] + ELEMENT_BIAS}
            dut.element.value = dut.query.value = pack(Element, biased)
            dut.query_negative.value = now["query_negative"]
            dut.query_address.value = now["query"]
            dut.query_write.value = int(now["kind"] == "load")
        top = at(cycle - Cell.top_cycles)
        dut.add.value = int(bool(top) and top["kind"] == "value")
        if top:
            dut.first.value = top["first"]
            dut.address.value = top["address"]
        select = at(cycle - Cell.select_cycles)
        if select:
            dut.select_value.value = int(select["kind"] == "value")
            if select.get("term"):
                dut.line_top.value = min(select["term"][0] + select["above"] + DOT_BIN_BIAS, 31)
        limb = at(cycle - Cell.limb_cycles)
        dut.limb_add.value = int(bool(limb) and limb["kind"] == "value")
        if limb:
            dut.limb_address.value = limb["address"]
            dut.negative.value = limb["negative"]
        await edge
        if top and top["kind"] == "score":
            expected = 1 << top["term"][0] + DOT_BIN_BIAS - DOT_BINS.start if top["term"] else 0
            assert value(dut.bins) == expected
        if top and top["kind"] == "value" and not top["first"]:
            expected = top["before"][0] + SUM_BIN_BIAS if top["before"] else 0
            assert value(dut.held_top) == expected
        if limb and limb["kind"] == "score":
            got = value(dut.high), value(dut.low)
            if limb["term"] is None:
                assert got == (0, 0)
            else:
                _, high, low = limb["term"]
                assert got == [(high, low), (0, high), (0, 0)][limb["above"]]
        if limb and limb["kind"] == "value" and limb["before"]:
            seen += 1
            held = [unpack(signed(LIMB_BITS), value(port)) for port in (dut.held_high, dut.held_low)]
            assert tuple(held) == limb["before"][1:]
    assert seen > 1000
