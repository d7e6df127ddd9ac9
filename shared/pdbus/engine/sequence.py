"""One choice of one request, as the engine computes it, and what the engine tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from pdbus.context import Deadline
from pdbus.engine.arriving import Arriving
from pdbus.errors import PdbusError
from pdbus.kv.page_hold import PageHold
from pdbus.kv.prefix import PageKey, PrefixScope
from pdbus.messages.common import Ticket
from pdbus.messages.router import Finish, TokenLogprob
from pdbus.model.sampler import Sampler

if TYPE_CHECKING:
    from pdbus.engine.version import Version

Key: TypeAlias = tuple[str, int]
"""(session, attempt): names a sequence, a lease and a KV stream."""


@dataclass(eq=False, slots=True)
class Lower:
    """A sequence's full pages below some layer: they may be there although the layers above have changed."""

    layer: int
    scope: PrefixScope
    keys: tuple[PageKey, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, and how far their KV is computed.

    The engine's thread alone changes it after `Core.submit`, except that the event loop may write into the pages of
    one that is not `ready`. With `handoff` the sequence ends with its first new token, each layer's KV is announced,
    and its pages stay with it until `Core.discard`, as they do where it ends before it was ready; else it goes on to
    its end and its pages are freed there.
    """

    ticket: Ticket
    version: Version
    """The one root that it is computed from; pinned by whoever submits it until it has ended."""
    deadline: Deadline
    hold: PageHold
    """Empty: the engine takes pages as soon as there are any."""
    handoff: bool = False
    sampled: tuple[int, ...] = ()
    """Tokens of the answer after those of the ticket, sampled elsewhere in the same attempt."""
    keys: tuple[PageKey, ...] = ()
    """Of all full pages that it may share and publish; none: its pages stay private."""
    scope: PrefixScope | None = None
    """Of the keys that pages get which it fills with its answer; None: those stay private."""
    lower: tuple[Lower, ...] = ()
    """The same, for `keys`: from the lowest up."""
    computed: int = 0
    """Tokens from the first on whose KV is in its pages."""
    resumed: int = 0
    """Up to this token the layers below `resume_layer` are computed, and what enters it."""
    resume_layer: int = 0
    ready: bool = True
    """False: admitted, but the event loop still fills some of its pages."""
    arriving: Arriving | None = None
    """It is computed although it is not ready: what is missing of its first `computed` tokens comes meanwhile."""
    present: int = 0
    """With `arriving`: the tokens that do not have to come."""
    cancelled: bool = False
    admitted: int = 0
    """Its number in the order of admission."""
    served: int = 0
    """The turn in which some of it was computed last, or in which it was admitted."""
    published: int = 0
    """Pages from the first on that are findable under `keys`, its own or shared ones."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """As far as computed, where the ticket asks for them."""
    came: int = field(init=False)
    """Tokens from the first on that it did not compute here: what entered the layers is not in its pages."""
    tokens: list[int] = field(init=False)
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        ticket = self.ticket
        self.came = self.computed
        self.tokens = [*ticket.tokens, *self.sampled]
        self.sampler = Sampler(
            ticket.sampling,
            seed=ticket.seed,
            choice=ticket.choice,
            prompt=ticket.prompt,
            delivered=(*ticket.delivered, *self.sampled),
        )

    @property
    def key(self) -> Key:
        return self.ticket.session, self.ticket.attempt

    @property
    def interrupted(self) -> bool:
        """As its ticket."""
        return self.ticket.interrupted

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come with the attempt's first token."""
        return self.ticket.prompt_logprobs is not None and self.output_index == len(self.ticket.delivered)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output_index(self) -> int:
        """Output index of the next token."""
        return len(self.tokens) - len(self.ticket.prompt)

    def arrive(self, tokens: int, arriving: Arriving) -> None:
        """The first `tokens` tokens are taken for computed while their KV comes."""
        self.present, self.computed, self.arriving = self.computed, tokens, arriving
        self.came = max(self.came, tokens)

    def set_back(self) -> None:
        """Takes that back, unless what it was about is computed."""
        if self.arriving:
            self.computed, self.arriving = self.present, None

    def filled(self, tokens: int) -> None:
        """The KV of the first `tokens` tokens is in its pages, and nobody writes into them any more."""
        self.set_back()
        self.computed, self.ready = max(self.computed, tokens), True
        self.came = max(self.came, tokens)

    def leave(self, pages: int) -> bool | None:
        """By work in the engine's thread: it is let go of, as one that is cancelled, unless more than `pages` of its
        pages are published by now (None). False where it has ended."""
        if self.cancelled or self.hold.released:
            return False
        if self.published > pages:
            return None
        self.cancelled = True
        return True

    def append(self, token: int) -> Finish | None:
        """Takes the next token. A stop id ends the answer and is not part of it."""
        if token in self.ticket.stop_ids:
            return "stop"
        self.tokens.append(token)
        full = self.output_index >= self.ticket.max_tokens or len(self.tokens) >= self.version.config.max_positions
        return "length" if full else None


@dataclass(frozen=True, slots=True)
class Started:
    """Admitted: it has its pages, and the KV of its first `cached_tokens` tokens was found in them; up to
    `resumed_tokens`, if that is more, that of the lower layers."""

    sequence: Sequence
    cached_tokens: int
    resumed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LayerReady:
    """The KV of `tokens` tokens from `start` on is final in this layer's pages. Only with `handoff`."""

    sequence: Sequence
    layer: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Produced:
    """The next token (`ids` empty where a stop id or a limit of 0 ended the answer), and the answer's end with it."""

    sequence: Sequence
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The engine has let go of the sequence, and says nothing of it any more. `error`: why it ended early."""

    sequence: Sequence
    error: PdbusError | None = None


Event: TypeAlias = Started | LayerReady | Produced | Ended
