"""The event loop: continuous batching, step by step, over the step times of `nearkv.estimate`.

A step takes every sequence that decodes one token further, and works on prompts with what is left of its
tokens, first come, first served (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024; vLLM). Requests are admitted in
their order while a step has tokens left, sequences may join, and the rows of their prompts have room. Where
sequences have no room to grow, the one that was admitted last gives its rows back and is the first in the
queue again.

Between events (an arrival, an end, a load, a full tier) steps differ in nothing but their rows, so they are
taken in one go; each still has its own time.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from nearkv.estimate.layers import link_rates
from nearkv.estimate.steps import NO_PROMPT, Prompt, Rows, Step, Work, prompt_attention
from nearkv.estimate.systems import MEMORY

from .loads import Loads
from .machine import Machine, Serving
from .result import Outcome, Result, log_table
from .rooms import Rooms
from .sequence import Running
from .tiers import Store
from .trace import Trace

Report = Callable[[int, int], None]
"""Told how many requests are answered or refused, and of how many."""
_REPORT_EVERY = 64


class Engine:
    """One system that answers one trace.

    Parameters
    ----------
    machine : the system.
    trace : the requests.
    serving : how it serves.
    report : told of progress.

    Members
    -------
    store : rows and blocks in every tier.
    outcomes : of the requests that are through.
    now : seconds since the first arrival.
    """

    def __init__(
        self, machine: Machine, trace: Trace, serving: Serving, report: Report = lambda done, total: None
    ) -> None:
        self.machine = machine
        self.trace = trace
        self.serving = serving
        self.store = Store([place.rows for place in machine.places], trace.block_tokens)
        self.outcomes: list[Outcome] = []
        self.now = 0.0
        self._report = report
        self._loads = Loads(machine)
        self._rooms = Rooms(machine, self.store, self._loads, prefix_cache=serving.prefix_cache)
        self._setup = machine.setup
        self._write_rate = link_rates(machine.setup)[0]
        self._arrivals = deque(
            Running(number, request, len(machine.places)) for number, request in enumerate(trace.requests)
        )
        self._waiting: deque[Running] = deque()
        self._admitted: dict[int, Running] = {}  # in the order of their admission
        self._prompts: dict[int, Running] = {}  # of these, those whose prompt is worked on
        self._decoding: dict[int, Running] = {}
        self._ends: list[tuple[int, int]] = []  # step after which a sequence ends, and its number
        self._blocked = False  # whether the first in the queue has no room until something is given back
        self._steps = 0
        self._grown = [0, 0]  # rows that each home has taken of a sequence that decodes all the time
        self._rows = [0, 0]  # of the sequences that decode, in each home
        self._near = 0
        self._noted = (0.0, 0.0)  # what the log has of `loaded` and `_moved` over the devices' links
        self._log = array("d")
        self._gaps = array("d")  # pairs: seconds between two tokens, and how many sequences had them

    def run(self) -> Result:
        """Answer every request."""
        while self._arrivals or self._waiting or self._admitted:
            self._arrive()
            home = self._room_to_grow()
            self._admit()
            chunks = self._chunks()
            if chunks or self._decoding:
                self._advance(chunks, home)
            elif self._arrivals or self._admitted:
                self._wait()
            elif self._waiting:
                raise RuntimeError(f"{len(self._waiting)} requests wait for nothing: a defect of nearkv")
        self._report(len(self.outcomes), len(self.trace.requests))
        self.outcomes.sort(key=lambda one: one.number)
        return Result(
            machine=self.machine,
            trace=self.trace,
            outcomes=self.outcomes,
            log=log_table(self._log, len(self.machine.places)),
            gaps=self._gaps,
            loaded=self._loads.loaded,
            moved=[self._moved(at) for at in range(len(self.machine.places))],
        )

    def _moved(self, at: int) -> float:
        """Bytes of prefixes that came down to a place."""
        return self.store.tiers[at].moved_in * self.machine.places[at].row_bytes

    # requests come and are admitted

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[0].request.arrival_s <= self.now:
            one = self._arrivals.popleft()
            why_not = self._refusal(one)
            if why_not:
                self._finish(one, why_not)
            else:
                self._waiting.append(one)

    def _refusal(self, one: Running) -> str:
        """Why a request can never be answered, or nothing."""
        asked = one.request.prompt + one.request.output
        longest = self._setup.context
        if asked > longest:
            return f"{asked} tokens are more than the longest that is accepted (--max-context), {longest}"
        need = one.whole + self.machine.extra_rows(one.whole)
        if need > self.machine.home_rows:
            more = self.machine.system == MEMORY and not self.serving.spill
            spill = "; --spill lets them lie in CXL memory" if more else ""
            return f"{need} rows of KV have no room; {self.machine.home_rows} have{spill}"
        return ""

    def _admit(self) -> None:
        left = self.serving.step_tokens - len(self._decoding)
        left -= sum(one.prompt - one.worked for one in self._prompts.values() if one.ready)
        while self._waiting and left > 0 and not self._blocked and len(self._admitted) < self._setup.batch:
            one = self._waiting[0]
            if not self._rooms.give(one):
                self._blocked = True
                return
            self._waiting.popleft()
            self._admitted[one.number] = self._prompts[one.number] = one
            if one.admitted_s < 0:
                one.admitted_s = self.now
            if one.ready:
                left -= one.prompt - one.worked

    # steps

    def _room_to_grow(self) -> int:
        """Take a row in one home for every sequence that decodes; those admitted last give way."""
        while self._decoding:
            for at in range(len(self.machine.homes)):
                if self.store.tiers[at].room >= len(self._decoding):
                    self.store.take(at, len(self._decoding))
                    return at
            self._preempt()
        return 0

    def _preempt(self) -> None:
        number, one = self._admitted.popitem()
        if number in self._decoding:
            self._leave(one)
            one.worked = one.prompt
        one.reached = max(one.reached, one.worked)
        self._let_go(one)
        one.preemptions += 1
        self._waiting.appendleft(one)

    def _chunks(self) -> list[tuple[Running, int]]:
        """Prompts of the next step, and how many tokens of each."""
        left = self.serving.step_tokens - len(self._decoding)
        chunks = []
        for one in self._prompts.values():
            if left <= 0:
                break
            if one.ready:
                tokens = min(left, one.prompt - one.worked)
                chunks.append((one, tokens))
                left -= tokens
        return chunks

    def _advance(self, chunks: Sequence[tuple[Running, int]], home: int) -> None:
        """One step with prompts, or as many without as differ in nothing but their rows."""
        batch, store, began = len(self._decoding), self.store, self.now
        count, until = 1, 0.0
        if batch:
            if not chunks:
                self._drop_ended()
                count = min(self._ends[0][0] - self._steps, 1 + store.free(home) // batch)
                joins = self._arrivals and not self._waiting and len(self._admitted) < self._setup.batch
                until = self._arrivals[0].request.arrival_s if joins else float("inf")
            if home == self.machine.device and self._near < batch:
                self._near = batch
                for one in self._decoding.values():
                    one.near = True
        prompt, written = self._prompt(chunks)
        own = self.machine.homes[home].row_bytes if home == self.machine.device else 0.0
        written += self._rooms.sent() + batch * own
        windowed = any(kind.window is not None for kind in self._setup.model.attention)
        contexts = [self._context(one) for one in self._decoding.values()] if windowed else []
        done, read, sent = 0, 0.0, 0.0
        while done < count:
            done += 1
            self._rows[home] += batch
            work = Work(batch=batch, rows=self._work_rows(contexts, done), near=self._near, prompt=prompt)
            step = self.machine.form(self._setup, work)
            seconds = max(step.seconds, written / self._write_rate)
            seconds, arrived = self._pass(seconds, step)
            if batch:
                self._gaps.extend((seconds, batch))
            read += step.fetched + step.in_bytes
            sent += step.out_bytes + written
            written = batch * own
            if arrived or self.now >= until:
                break
        if batch:
            store.take(home, batch * (done - 1))
            self._steps += done
            self._grown[home] += done
        self._note(began, done, batch, prompt.tokens, read, sent)
        self._end()
        for one, tokens in chunks:
            self._work_on(one, tokens)

    def _prompt(self, chunks: Sequence[tuple[Running, int]]) -> tuple[Prompt, float]:
        """What prompts ask of a step, and the bytes that it writes to the devices."""
        if not chunks:
            return NO_PROMPT, 0.0
        machine = self.machine
        away = new = 0
        if machine.device is not None:
            staging = len(machine.homes) == 1
            for one, tokens in chunks:
                away += one.away(one.worked, staging=staging)
                here = 0 if staging else one.found + one.first_rows - one.worked
                new += tokens - min(tokens, max(0, here))
        row_bytes = machine.homes[machine.device].row_bytes if machine.device is not None else 0.0
        prompt = Prompt(
            tokens=sum(tokens for _, tokens in chunks),
            attention_s=prompt_attention(self._setup, [(one.worked, tokens) for one, tokens in chunks]),
            fetched=away * row_bytes,
        )
        return prompt, new * row_bytes

    def _work_rows(self, contexts: Sequence[int], done: int) -> list[Rows]:
        """What the sequences attend to in the step that lets them grow by their `done`-th row."""
        first, second = self._rows
        whole = max(1, first + second)
        device = self.machine.device
        rows = []
        for kind in self._setup.model.attention:
            if kind.window is None:
                parts: tuple[float, float] = (first, second)
            else:  # rows in the windows lie where the others do
                seen = sum(min(context + done, kind.window) for context in contexts)
                parts = (first * seen / whole, second * seen / whole)
            if device == 0:
                rows.append(Rows(device=parts[0]))
            else:
                rows.append(Rows(gpu=parts[0], device=parts[1]))
        return rows

    def _work_on(self, one: Running, tokens: int) -> None:
        """A step has worked on tokens of a prompt: whole blocks can be shared, the last one gives a token."""
        one.repeated += max(0, min(tokens, one.reached - one.worked))
        one.worked += tokens
        self._rooms.share(one, one.worked - tokens)
        if one.worked < one.prompt:
            return
        del self._prompts[one.number]
        self._rooms.unstage(one)
        if one.first_s < 0:
            one.first_s = self.now
        else:
            self._gaps.extend((self.now - one.last_s, 1))
        one.generated += 1
        one.last_s = self.now
        if one.generated == one.request.output:
            self._finish(one)
        else:
            self._join(one)

    # sequences that decode

    def _join(self, one: Running) -> None:
        rows = self._held(one)
        one.joined = (self._steps, (self._grown[0], self._grown[1]))
        one.near = self.machine.device is not None and rows[self.machine.device] > 0
        self._near += one.near
        for at in (0, 1):
            self._rows[at] += rows[at]
        self._decoding[one.number] = one
        heapq.heappush(self._ends, (self._steps + one.request.output - one.generated, one.number))

    def _held(self, one: Running) -> list[int]:
        """Rows of its prompt in each home."""
        rows = list(one.own)
        for block in one.blocks:
            rows[block.tier] += self.store.block_tokens
        return rows

    def _context(self, one: Running) -> int:
        """Rows of a sequence that decodes."""
        return one.request.prompt + one.generated - 1 + self._steps - one.joined[0]

    def _leave(self, one: Running) -> None:
        """No more decoding: what it has grown by becomes its own."""
        del self._decoding[one.number]
        steps, grown = one.joined
        held = self._held(one)
        for at in (0, 1):
            more = self._grown[at] - grown[at]
            self._rows[at] -= held[at] + more
            one.own[at] += more
        self._near -= one.near
        one.generated += self._steps - steps
        if self._steps > steps:
            one.last_s = self.now

    def _drop_ended(self) -> None:
        """Forget ends of sequences that were made to give way."""
        while not self._is_end(*self._ends[0]):
            heapq.heappop(self._ends)

    def _is_end(self, step: int, number: int) -> bool:
        one = self._decoding.get(number)
        return one is not None and one.joined[0] + one.request.output - one.generated == step

    def _end(self) -> None:
        """Sequences that have their last token leave."""
        while self._ends and self._ends[0][0] <= self._steps:
            end = heapq.heappop(self._ends)
            if self._is_end(*end):
                one = self._decoding[end[1]]
                self._leave(one)
                self._finish(one)

    def _finish(self, one: Running, refused: str = "") -> None:
        if not refused:
            del self._admitted[one.number]
            self._let_go(one)
        self.outcomes.append(Outcome.of(one, refused))
        if len(self.outcomes) % _REPORT_EVERY == 0:
            self._report(len(self.outcomes), len(self.trace.requests))

    def _let_go(self, one: Running) -> None:
        self._prompts.pop(one.number, None)
        self._rooms.take_back(one)
        self._blocked = False

    # time

    def _pass(self, seconds: float, step: Step | None = None) -> tuple[float, bool]:
        """Time goes by, and loads come nearer, with what steps leave of the link.

        Where a step and loads both want rows over the devices' link they have half of it each.

        Returns
        -------
        Seconds that the step took with its share of the link, and whether a load has arrived.
        """
        device, used = self.machine.device, 0.0
        if step and device is not None:
            used = step.fetched + step.in_bytes
            if step.fetched and self._loads.waits(device):
                seconds = max(seconds, 2 * step.fetched / self.machine.places[device].rate)
        self.now += seconds
        return seconds, self._loads.come(seconds, used)

    def _wait(self) -> None:
        """Nothing to work on: the next arrival or load comes."""
        began = self.now
        arrival = self._arrivals[0].request.arrival_s if self._arrivals else float("inf")
        # not until when: late in a trace `now` is too coarse to tell when the last bytes of a load have come
        seconds = min([arrival - began, *self._loads.due()])
        self._pass(seconds)
        if seconds == arrival - began:
            self.now = arrival
        self._note(began, 0, 0, 0, 0.0, 0.0)

    def _note(self, began: float, steps: int, batch: int, prompt: int, read: float, sent: float) -> None:
        """A line of the log; what prefixes move over the devices' links is in it."""
        linked = self.machine.linked
        if linked is not None:
            loaded, moved = self._loads.loaded[linked], self._moved(linked)
            read, sent = read + loaded - self._noted[0], sent + moved - self._noted[1]
            self._noted = (loaded, moved)
        self._log.extend((began, self.now, steps, batch, prompt, len(self._waiting), read, sent))
        for tier in self.store.tiers:
            self._log.extend((tier.used, len(tier.kept) * self.store.block_tokens))
