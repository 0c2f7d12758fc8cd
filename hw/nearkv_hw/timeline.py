"""The stages of a job as events, for timelines: what `nearkv trace` shows of the RTL.

The taps stand between the blocks, so that the blocks know nothing of them. Passes go to every unit and to the
results side in one order: the n-th pass anywhere is the n-th that the walker sent.
"""

from amaranth.hdl import Module, Signal
from amaranth.lib import data

from .abi.descriptor import COMPLETION
from .abi.lines import LINE_SHIFT
from .abi.window import DOORBELL, DOORBELL_OFFSET
from .common.event import Event
from .interfaces import BeatKind
from .structs import layout_of

EVENTS = {
    "window.doorbell": ("a doorbell was rung", "descriptors posted", "aperture"),
    "window.fetched": ("a descriptor was taken from its ring", "its index", "aperture"),
    "walker.judged": ("a descriptor and its table's header were checked", "", ""),
    "unit.pass": ("a pass reached a unit", "query heads", "aperture"),
    "unit.page": ("a page reached a unit", "page", "rows; 0 ends the pass"),
    "unit.asked": ("the unit asked for the first K line of a pass", "its line of the slice", ""),
    "unit.loaded": ("the queries of a pass are in the unit", "", ""),
    "unit.first": ("the first K line of a pass was taken", "", ""),
    "unit.ended": ("the last line of a pass was taken", "", ""),
    "unit.drain": ("the first or the last beat of a pass's partials left", "1 if it is the last", ""),
    "results.write": ("a line of results was written", "device line", "pass, modulo those open at once"),
    "results.done": ("the results of a pass are in memory", "status", "K and V lines"),
    "completer.record": (
        "a completion record was written",
        "descriptor's index",
        "passes << 16 | status << 8 | aperture",
    ),
}
"""What each event tells: what happened, and its two values."""


def stage_taps(*, endpoint, window, walker, units, results, completer):
    """A module with an `Event` for every stage of a job.

    Parameters
    ----------
    endpoint, window, walker, units, results, completer : the blocks of a device, which are only looked at;
        `results` is None where there are no units.
    """
    m = Module()

    def tap(name, valid, a=0, b=0, index=0):
        if name not in EVENTS:
            raise ValueError(f"{name!r} is no event; there are {', '.join(EVENTS)}")
        event = Event(name=name, index=index)
        m.submodules[f"{name.replace('.', '_')}_{index}"] = event
        m.d.comb += [event.valid.eq(valid), event.a.eq(a), event.b.eq(b)]

    access = endpoint.window.request.payload
    rung = _taken(endpoint.window.request) & access.write & (access.line == DOORBELL_OFFSET >> LINE_SHIFT)
    tail = access.data[DOORBELL.offset("tail") :][: DOORBELL["tail"].width]
    tap("window.doorbell", rung, tail, access.tenant)
    posted, completed = window.descriptors.payload, completer.o.payload
    tap("window.fetched", _taken(window.descriptors), posted.index, posted.tenant)
    tap("walker.judged", walker.judged)
    record = data.View(layout_of(COMPLETION), completed.record)
    ticket = completer.tickets.payload
    passes = (ticket.passes << ticket.bounds)[:16]  # those of bounds, too
    outcome = (passes << 16) | (record.status << 8) | completed.tenant
    tap("completer.record", _taken(completer.o), completed.index, outcome)
    for n, unit in enumerate(units):
        page, job = unit.pages.payload, unit.jobs.payload
        tap("unit.pass", _taken(unit.jobs), job.queries, job.tenant, n)
        tap("unit.page", _taken(unit.pages), page.page, page.rows & (~page.last).replicate(14), n)
        tap("unit.asked", unit.stages.asked, unit.memory.request.payload.line, index=n)
        for stage in ("loaded", "first", "ended"):
            tap(f"unit.{stage}", unit.stages[stage], index=n)
        between = Signal(init=1, name=f"between_{n}")
        last = unit.partials.payload.kind == BeatKind.END
        with m.If(_taken(unit.partials)):
            m.d.sync += between.eq(last)
        tap("unit.drain", _taken(unit.partials) & (between | last), last, index=n)
    if results is None:
        return m
    write, done = results.fabric.request.payload, results.done.payload
    tap("results.write", _taken(results.fabric.request), write.line, write.id)
    tap("results.done", _taken(results.done), done.status, done.lines)
    return m


def _taken(stream):
    return stream.valid & stream.ready
