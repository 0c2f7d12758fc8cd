"""What the driver raises: each error is a `NearkvError`, and a built-in one too where that is natural."""

from __future__ import annotations

from nearkv_hw.abi import Status


class NearkvError(Exception):
    """The base of every error that nearkv raises on purpose."""


class ArgumentError(NearkvError, ValueError):
    """A value that is not allowed."""


class ShapeError(ArgumentError):
    """A tensor whose shape does not fit."""


class DtypeError(NearkvError, TypeError):
    """A tensor of a type that the cache does not hold."""


class UnknownHandleError(NearkvError, LookupError):
    """A layer, sequence or tenant that does not exist here."""


class StalePrefixError(UnknownHandleError):
    """A prefix that was dropped or reclaimed; its pages may hold something else by now."""


class ClosedError(NearkvError, ValueError):
    """A device, cache or sequence that was closed or freed."""


class EvictedError(ClosedError):
    """A sequence with a priority that went because memory ran short."""


class OutOfMemoryError(NearkvError, MemoryError):
    """The device has no extent left that this tenant could own."""


class QuotaError(OutOfMemoryError):
    """The tenant owns as much as the device's owner lets it; see `nearkv.owner.Owner.set_quota`."""


class VersionError(NearkvError, RuntimeError):
    """The device is none, or one that keeps another version of the abi or of the numerics contract."""


class DeviceTimeoutError(NearkvError, TimeoutError):
    """The device did not answer; it takes no more work."""


class TenantTakenError(NearkvError, PermissionError):
    """Another host of a served device uses this tenant."""


class LinkError(NearkvError, ConnectionError):
    """The link to the device is gone, or was: what was under way may have arrived in part.

    `Device.recover` takes over what was committed, tenant by tenant, once the link is back.
    """


class DeviceResetError(NearkvError, RuntimeError):
    """The device was reset: everything that any tenant had on it is lost. `Device.recover` starts anew."""


class ProtocolError(NearkvError, RuntimeError):
    """The device answered what no device may answer."""


class AccessError(NearkvError, RuntimeError):
    """A line that the host read was poisoned, or no memory answered.

    Members
    -------
    address : device address of the first such line.
    poison : whether it was poisoned.
    """

    def __init__(self, message: str, *, address: int, poison: bool) -> None:
        super().__init__(message)
        self.address = address
        self.poison = poison


class DeviceError(NearkvError, RuntimeError):
    """A descriptor that completed with a status other than OK.

    Members
    -------
    status : why.
    tag : the descriptor's tag: its number in the tenant's ring since reset.
    detail : the page at fault, or the extent that is taken.
    sequence : the first sequence of the batch whose job failed, by its place; None for what is no job.
    """

    def __init__(
        self, message: str, *, status: Status, tag: int, detail: int, sequence: int | None = None
    ) -> None:
        super().__init__(message)
        self.sequence = sequence
        self.status = status
        self.tag = tag
        self.detail = detail

    @property
    def page(self) -> int | None:
        """The index in the context of the page at fault, for the statuses that name one."""
        return self.detail if self.status in (Status.BAD_PAGE, Status.PAGE_DENIED, Status.POISON) else None


class MismatchError(NearkvError, AssertionError):
    """A result whose bits are not those of the contract."""
