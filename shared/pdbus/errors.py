"""The exception tree and its wire codes.

    PdbusError                  internal
    ├── InvalidRequest          invalid_request
    │   └── TooLarge            too_large
    ├── Unauthorized            unauthorized
    ├── Forbidden               forbidden
    ├── NotFound                not_found
    │   └── RootGone            root_gone           another worker may still hold the root
    ├── Conflict                conflict
    ├── StaleAttempt            stale_attempt       a newer attempt owns the session
    ├── DeadlineExceeded        deadline_exceeded
    ├── Cancelled               cancelled
    ├── Corrupt                 corrupt             digest, checksum or sequence did not match
    ├── QuotaExceeded           quota_exceeded      until something is deleted, or `retry_after_s` have passed
    ├── Overloaded              overloaded          try again after `retry_after_s`
    └── Unavailable             unavailable         nobody answers there now: try another peer

An error crosses the bus as a `WireError` and becomes the same class on the other side, so a caller catches by class
and not by code. An unknown code becomes a plain `PdbusError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MOST_RETRY_AFTER_S = 3600.0
"""What a peer tells beyond it means nothing."""


class PdbusError(Exception):
    """Base of every error that may cross the bus. `retryable`: the same request may succeed elsewhere or later."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The field of the request that was wrong, in the caller's terms."""
        self.retry_after_s = retry_after_s


class InvalidRequest(PdbusError):
    code = "invalid_request"


class TooLarge(InvalidRequest):
    code = "too_large"


class Unauthorized(PdbusError):
    code = "unauthorized"


class Forbidden(PdbusError):
    code = "forbidden"


class NotFound(PdbusError):
    code = "not_found"


class RootGone(NotFound):
    code = "root_gone"
    retryable = True


class Conflict(PdbusError):
    code = "conflict"


class StaleAttempt(PdbusError):
    code = "stale_attempt"


class DeadlineExceeded(PdbusError):
    code = "deadline_exceeded"


class Cancelled(PdbusError):
    code = "cancelled"


class Corrupt(PdbusError):
    code = "corrupt"
    retryable = True


class QuotaExceeded(PdbusError):
    code = "quota_exceeded"


class Overloaded(PdbusError):
    code = "overloaded"
    retryable = True


class Unavailable(PdbusError):
    code = "unavailable"
    retryable = True


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as it travels: `code` selects the class, the rest is for people."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> WireError:
        """The wire form of any exception; a foreign one is told as internal, without its text (it may hold secrets)."""
        if isinstance(error, PdbusError):
            return cls(error.code, error.message, error.param, error.retry_after_s)
        if isinstance(error, TimeoutError):
            return cls(DeadlineExceeded.code, "the deadline passed")
        return cls(PdbusError.code, f"internal error ({type(error).__name__}); the service's log has the details")

    def to_exception(self) -> PdbusError:
        known, after_s = _BY_CODE.get(self.code, PdbusError), self.retry_after_s
        if after_s is not None and not 0 <= after_s <= MOST_RETRY_AFTER_S:  # NaN too
            after_s = None
        return known(self.message, param=self.param, retry_after_s=after_s)


def _tree(base: type[PdbusError]) -> list[type[PdbusError]]:
    return [base, *(leaf for child in base.__subclasses__() for leaf in _tree(child))]


_BY_CODE = {cls.code: cls for cls in _tree(PdbusError)}
