"""Work that is under way: streams of calls, what they will return, and events to wait for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from .arguments import whole_number
from .errors import ClosedError

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """What a call will return; `KVCache.attend_async` makes it.

    Parameters
    ----------
    finish : waits for it.
    is_complete : whether the device has done its part.
    """

    def __init__(self, finish: Callable[[], Result], is_complete: Callable[[], bool]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._is_complete = is_complete
        self._value: Result | None = None
        self._error: Exception | None = None

    @property
    def waited_for(self) -> bool:
        """Whether somebody has waited for it."""
        return self._finish is None

    @property
    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._finish is None or self._is_complete()

    def result(self) -> Result:
        """Wait, and return what the call returns; the same whenever it is asked.

        Raises
        ------
        What the call raises once it is under way: DeviceError, AccessError, DeviceTimeoutError, ClosedError.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        value: Result = self._value  # type: ignore[assignment]
        return value

    def wait(self) -> None:
        """Wait, whatever comes of it."""
        if self._finish is None:
            return
        finish, self._finish = self._finish, None
        try:
            self._value = finish()
        except Exception as error:
            self._error = error

    def abandon(self) -> None:
        """The device ends before the call does."""
        if self._finish is not None:
            self._finish = None
            self._error = ClosedError("the device was closed while the call was under way")


class Event:
    """A point in a stream; `Stream.record` makes it.

    Parameters
    ----------
    under_way : what was before it in the stream.
    flush : sends what waits to be written.
    """

    def __init__(self, under_way: list[Pending[object]], flush: Callable[[], None]) -> None:
        self._under_way = under_way
        self._flush = flush

    def and_then(self, other: Event) -> Event:
        """The event of both."""
        return Event([*self._under_way, *other._under_way], self._flush)

    @property
    def done(self) -> bool:
        """Whether the device has done all that was before it."""
        self._flush()
        return all(pending.done for pending in self._under_way)

    def wait(self) -> None:
        """Wait until it has."""
        self._flush()
        for pending in self._under_way:
            pending.wait()


class Stream:
    """Calls that are under way together; `Device.stream` makes it.

    A call that was made later never changes what an earlier one returns, in whichever streams they are. What
    a stream adds is how many of its calls are under way at most, and something to wait for.

    Parameters
    ----------
    depth : calls under way at most; another one waits for the oldest.
    flush : sends what waits to be written.
    """

    def __init__(self, depth: int, flush: Callable[[], None]) -> None:
        whole_number("depth", depth, 1, 1 << 16)
        self.depth = depth
        self._flush = flush
        self._under_way: deque[Pending[object]] = deque()
        self._event: Event | None = None

    @property
    def under_way(self) -> int:
        """Calls that nobody has waited for yet."""
        self._under_way = deque(one for one in self._under_way if not one.waited_for)
        return len(self._under_way)

    def begin(self) -> None:
        """Wait for the events that this stream was told to wait for."""
        if self._event is not None:
            event, self._event = self._event, None
            event.wait()

    def make_room(self) -> None:
        """Wait until another call fits."""
        while self.under_way >= self.depth:
            self._under_way.popleft().wait()

    def add(self, pending: Pending[Result]) -> Pending[Result]:
        """A call is under way."""
        self._under_way.append(pending)  # type: ignore[arg-type]
        return pending

    def record(self) -> Event:
        """What is in the stream now, to wait for."""
        return Event(list(self._under_way), self._flush)

    def wait(self, event: Event) -> None:
        """Have calls that come later in this stream begin after an event of another one."""
        self._event = event if self._event is None else self._event.and_then(event)

    def synchronize(self) -> None:
        """Wait for all calls of the stream, and until rows that were appended are committed."""
        self._flush()
        while self._under_way:
            self._under_way.popleft().wait()

    def abandon(self) -> None:
        """The device ends before the calls do."""
        while self._under_way:
            self._under_way.popleft().abandon()
