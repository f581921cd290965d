"""The plan: everything that ranks must agree on before a download starts; statuses; and who fetches whom.

The first rank builds it and sends it to all; they compare digests. It holds no credentials: it names stores,
and each rank maps the names to stores. `partition`, `backfill` and `deal` divide uids over ranks. They are
pure functions of the plan and of statuses that all ranks know; no result depends on how uids are divided.

An attempted uid has exactly one `Status`. Faults of peers and faults of this side are disjoint, so that
penalties can depend on the first alone. `Fault` carries a status from where a check fails to the record of
that peer, and no further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megalith.errors import InputError, MegalithError
from megalith.gather.payload_schema import PayloadSchema
from megalith.ops import checks
from megalith.storage.json_codec import (
    MAX_INT,
    Sha256,
    as_utc,
    canonical_json,
    from_json,
    json_digest,
    parse_json_object,
    to_json,
)

MAX_UIDS = 1 << 20
MAX_PLAN_BYTES = 1 << 28
Level = Literal["high", "max", "mega"]
LEVELS: tuple[Level, ...] = get_args(Level)
Shares = tuple[tuple[int, ...], ...]
"""Uids by rank."""


class Status(StrEnum):
    """The outcome of one peer in one attempt."""

    OK = "OK"
    NOT_FOUND = "NOT_FOUND"
    """No object at its location by the deadline."""
    TOO_EARLY = "TOO_EARLY"
    """Written before the window opened."""
    TOO_LATE = "TOO_LATE"
    """Written after the window closed."""
    TOO_LARGE = "TOO_LARGE"
    """More bytes than the plan allows."""
    CHANGED = "CHANGED"
    """Replaced while it was read, twice."""
    CORRUPT = "CORRUPT"
    """Not a payload, or a digest that does not match its bytes."""
    INVALID_SCHEMA = "INVALID_SCHEMA"
    """A payload of another model, window or peer."""
    OTHER_WEIGHTS = "OTHER_WEIGHTS"
    """Computed from other weights than those of this window."""
    INVALID_INDEX = "INVALID_INDEX"
    """An index out of range, repeated or out of order."""
    INVALID_VALUE = "INVALID_VALUE"
    """A value that is not finite or too large, or a code without a value."""
    DENIED = "DENIED"
    """The store refused (401, 403), but answers for another peer, or belongs to this one alone."""
    SLOW = "SLOW"
    """Its bytes began to arrive, but too slowly, while those of another peer arrived."""
    TIMEOUT = "TIMEOUT"
    """Not read before the deadline; the peer or the network was slow."""
    STORE_ERROR = "STORE_ERROR"
    """The store failed: 5xx, 429, connection, or credentials with which nothing can be read."""
    LOCAL_ERROR = "LOCAL_ERROR"
    """This machine failed: the spool is full, or Megalith has an error."""
    RANK_LOST = "RANK_LOST"
    """The rank that had to fetch it is lost."""
    DIGEST_CONFLICT = "DIGEST_CONFLICT"
    """Two ranks read different payloads of one peer."""


OUR_FAULTS = frozenset(
    {
        Status.OTHER_WEIGHTS,  # which of the two sides went astray is not known here
        Status.TIMEOUT,
        Status.STORE_ERROR,
        Status.LOCAL_ERROR,
        Status.RANK_LOST,
        Status.DIGEST_CONFLICT,
    }
)
"""Statuses for which no peer may be penalised."""

PEER_FAULTS = frozenset(Status) - OUR_FAULTS - {Status.OK}
"""Statuses that the peer caused."""

RETRIED = frozenset(
    {Status.NOT_FOUND, Status.DENIED, Status.SLOW, Status.TIMEOUT, Status.STORE_ERROR, Status.CHANGED}
)
"""Statuses after which another try may succeed."""


class Fault(MegalithError, ValueError):
    """Why the object of one peer was not accepted.

    Args:
        status: The status that the peer gets.
        detail: A sentence for the log.
    """

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """The outer step: clip, reduce, step."""

    optimizer: Literal["sgd", "nesterov", "sign"] = "sgd"
    """sgd: w -= lr * g. nesterov: with momentum. sign: w -= lr * sign(g)."""
    lr: float = 1.0
    """The outer learning rate."""
    momentum: float = 0.9
    """The momentum of nesterov."""
    rule: Literal["mean", "trimmed", "median"] = "mean"
    """How the values sent for a position become one: their mean, their mean without both ends, or their
    median."""
    mean: Literal["contributors", "peers"] = "contributors"
    """The mean is over the peers that sent the position, or over all (who did not send it, sent zero)."""
    trim: float = 0.1
    """The share of values that "trimmed" leaves out at each end."""
    clip: Literal["median", "none"] = "median"
    """median: each parameter of a peer is scaled down to the median of the peers' norms."""
    exchange: Literal["exact", "fast"] = "exact"
    """exact: weights are bit-identical for any number of ranks. fast: each rank adds its own peers, then the
    sums are added; only for rule="mean", and the last bits depend on the number of ranks."""

    def __post_init__(self) -> None:
        _check_choices(self, "update")
        _number(self, "update", "lr", 0.0, 1e30)
        _number(self, "update", "momentum", 0.0, 1.0, below=True)
        _number(self, "update", "trim", 0.0, 0.5, below=True)
        if self.exchange == "fast" and self.rule != "mean":
            raise InputError(f'update: exchange="fast" needs rule="mean", got {self.rule!r}')


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """When the indices of two peers are too similar, which of them is blamed, and what follows."""

    threshold: float = 0.4
    """A share of common positions from which a pair is a finding of level "high"."""
    max_from: float = 0.5
    """The share from which the level is "max"."""
    mega_from: float = 0.6
    """The share from which the level is "mega"."""
    full_rows: bool = False
    """Whether chunks that are sent completely count; they are equal for any two peers."""
    tie: Literal["later", "first"] = "later"
    """Who is blamed for a pair written at the same time: the later uid, or the first (as Templar)."""
    level: Literal["worst", "last"] = "worst"
    """The level of a uid over several pairs: the worst, or that of its last pair (as Templar)."""
    exclude: Literal["none", "high", "max", "mega"] = "none"
    """The level from which a blamed peer is excluded from this update."""
    sample: float = 1.0
    """The share of chunks that is counted first. Below 1, only pairs that come within `margin` of the
    threshold are then counted exactly; the other counts are estimates."""
    margin: float = 0.05
    """See `sample`. With n sampled chunks, a pair is missed with a probability of at most
    2 exp(-2 n margin^2)."""

    def __post_init__(self) -> None:
        _check_choices(self, "overlap")
        checks.flag(self.full_rows, "overlap: full_rows")
        for name in ("threshold", "max_from", "mega_from", "sample", "margin"):
            _number(self, "overlap", name, 0.0, 1e6)
        if not 0 < self.threshold <= self.max_from <= self.mega_from:
            raise InputError(
                "overlap: threshold, max_from and mega_from must be above 0 and ascend, got "
                f"{self.threshold}, {self.max_from}, {self.mega_from}"
            )
        if not 0 < self.sample <= 1:
            raise InputError(f"overlap: sample must be above 0 and at most 1, got {self.sample}")

    def level_of(self, shared: int, total: int) -> Level | None:
        """Return the level of a pair of peers, computed exactly.

        Args:
            shared: The number of positions that both sent.
            total: The number of positions that each sent.

        Returns:
            The level; None below the threshold.
        """
        checks.integer(shared, "shared", 0)
        share = Fraction(shared, checks.integer(total, "total", 0) or 1)
        limits = zip((self.mega_from, self.max_from, self.threshold), reversed(LEVELS), strict=True)
        return next((level for limit, level in limits if share >= Fraction(str(limit))), None)


@dataclass(frozen=True)
class Location:
    """Where the object of a peer is.

    A peer that has a bucket of its own gets a store of its own: `Location("gradient-3-7.pt", "bucket-7")`
    with `run_window(..., stores={"bucket-7": open_object_store("s3://bucket-7", access_key_id=...)})`. The
    plan travels to all ranks and into artifacts, so credentials are given to stores and not to plans.
    """

    key: str
    """The object's name in its store."""
    store: str = "default"
    """The name of the store, as each rank passes it in `stores`."""

    def __post_init__(self) -> None:
        checks.text(self.key, "location: key", 1024)
        checks.text(self.store, "location: store", 128)


def payload_key(run: str, window: int, uid: int) -> str:
    """Return where a peer puts its payload unless a plan has another location.

    Args:
        run: The name of the run.
        window: The number of the window.
        uid: The peer.

    Returns:
        The key in the store "default".
    """
    return f"payloads/{run}/{window}/{uid}.gather"


@dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """How long payloads are waited for, which are accepted, and what that may cost."""

    deadline: float = 90.0
    """Seconds for the primaries, from the moment a rank has the plan, and for each round of reserves."""
    grace: float = 3.0
    """Seconds after time_max until which a missing object is still waited for."""
    min_peers: int = 1
    """With fewer accepted peers the window is skipped."""
    backfill_rounds: int = 1
    """Rounds of reserves at most."""
    max_object_bytes: int = 1 << 32
    """The size of an object at most."""
    max_value: float = 1e6
    """The magnitude of a value at most."""
    memory_budget: int = 256 << 20
    """Bytes that fetching and the update may each hold at once on a rank."""
    formats: tuple[str, ...] = ("megalith",)
    """Payload formats that are accepted: "megalith", and "templar" for the torch files of Templar."""
    require_weights: bool = False
    """Whether payloads that do not state the weights that they were computed from are refused."""
    fingerprint_every: int = 1
    """Compute and compare the fingerprint of the weights in every Nth window; 0: never."""

    def __post_init__(self) -> None:
        for name, least in (
            ("backfill_rounds", 0),
            ("fingerprint_every", 0),
            ("max_object_bytes", 1),
            ("min_peers", 1),
            ("memory_budget", 1),
        ):
            checks.integer(getattr(self, name), f"gather: {name}", least, MAX_INT)
        for name in ("deadline", "grace"):
            _number(self, "gather", name, 0.0, 1e9)
        _number(self, "gather", "max_value", 1e-30, 1e30)
        checks.flag(self.require_weights, "gather: require_weights")
        if not isinstance(self.formats, tuple) or not self.formats:
            raise InputError(f"gather: formats must be a tuple of names, got {self.formats!r:.80}")
        for name in self.formats:
            checks.one_of(name, ("megalith", "templar"), "gather: formats")


@dataclass(frozen=True, kw_only=True)
class GatherPlan:
    """The gather of one window. Repeated uids count once; a uid in both lists is a primary."""

    run: str
    """The name of the run: 1 to 128 characters without "/"."""
    window: int
    """The number of the window; windows are applied in ascending order."""
    schema: PayloadSchema | Sha256
    """The model's schema, or its digest; the plan keeps the digest."""
    primary: tuple[int, ...]
    """The peers that are wanted."""
    reserve: tuple[int, ...] = ()
    """The peers that replace primaries that fail, in this order."""
    locations: Mapping[int, Location] = field(default_factory=dict)
    """By uid; a peer without one is looked for at `payload_key` in the store "default"."""
    time_min: datetime | None = None
    """The earliest time at which an object may have been written; without a zone it is in UTC."""
    time_max: datetime | None = None
    """The latest such time."""
    gather: GatherConfig = field(default_factory=GatherConfig)
    """How payloads are fetched and accepted."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    """The outer step."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """The search for copies."""
    skip: bool = False
    """Gather and report, but leave the weights."""
    weights: Sha256 | None = None
    """The fingerprint of the weights before the window. `run_window` sets it; payloads that were computed
    from other weights are refused."""
    attempt: int = 0
    """Counts restarts after lost ranks."""

    def __post_init__(self) -> None:
        primary = tuple(dict.fromkeys(_uids("primary", self.primary)))
        known = set(primary)
        reserve = tuple(u for u in dict.fromkeys(_uids("reserve", self.reserve)) if u not in known)
        known |= set(reserve)
        for name in ("time_min", "time_max"):
            moment = getattr(self, name)
            if moment is not None:
                object.__setattr__(self, name, as_utc(checks.instance(moment, datetime, f"plan: {name}")))
        if not isinstance(self.locations, Mapping):
            raise InputError(f"plan: locations must be a dict by uid, got {checks.kind(self.locations)}")
        places = {
            int(uid): checks.instance(place, Location, f"plan: locations[{uid}]")
            for uid, place in self.locations.items()
            if uid in known
        }
        if isinstance(self.schema, PayloadSchema):
            object.__setattr__(self, "schema", self.schema.digest)
        object.__setattr__(self, "primary", primary)
        object.__setattr__(self, "reserve", reserve)
        object.__setattr__(self, "locations", places)
        if "/" in checks.text(self.run, "plan: run", 128):
            raise InputError(f"plan: run must not have '/', got {self.run!r}")
        for name in ("schema", "weights") if self.weights is not None else ("schema",):
            if len(checks.text(getattr(self, name), f"plan: {name}")) != 64:
                raise InputError(f"plan: {name} must be a digest, got {getattr(self, name)!r:.80}")
        for name in ("window", "attempt"):
            checks.integer(getattr(self, name), f"plan: {name}", 0, MAX_INT)
        checks.flag(self.skip, "plan: skip")
        checks.instance(self.gather, GatherConfig, "plan: gather")
        checks.instance(self.update, UpdateConfig, "plan: update")
        checks.instance(self.overlap, OverlapConfig, "plan: overlap")
        if self.time_min is not None and self.time_max is not None and self.time_min > self.time_max:
            raise InputError(f"plan: time_min {self.time_min} is after time_max {self.time_max}")

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of its canonical form. Partials, artifacts and log lines carry it."""
        return json_digest(to_json(self))

    @property
    def is_checked(self) -> bool:
        """Whether the weights are compared after this window."""
        every = self.gather.fingerprint_every
        return every > 0 and self.window % every == 0

    def location(self, uid: int) -> Location:
        """Return where the object of a peer is.

        Args:
            uid: The peer.

        Returns:
            Its location.
        """
        (number,) = _uids("uid", [uid])
        return self.locations.get(number) or Location(payload_key(self.run, self.window, number))

    def differences(self, other: GatherPlan) -> list[str]:
        """Return the names of the fields that differ, sorted; `attempt` and `weights` may differ.

        Args:
            other: The plan to compare with.

        Returns:
            The names.
        """
        mine, theirs = to_json(self), to_json(checks.instance(other, GatherPlan, "other"))
        groups = [mine, *(mine[name] for name in _GROUPS)], [theirs, *(theirs[name] for name in _GROUPS)]
        flat = [{k: v for group in side for k, v in group.items() if k not in _LOCAL} for side in groups]
        return sorted(name for name in flat[0] if flat[0][name] != flat[1][name])

    def to_bytes(self) -> bytes:
        """Return the canonical form."""
        return canonical_json(to_json(self))

    @classmethod
    def from_bytes(cls, text: bytes) -> GatherPlan:
        """Read what `to_bytes` wrote.

        Args:
            text: The bytes.

        Returns:
            The plan.

        Raises:
            InputError: A field is missing, unknown or wrong; the message names it.
        """
        fields = parse_json_object(
            text, lambda problem: InputError(f"plan: {problem}"), max_bytes=MAX_PLAN_BYTES
        )
        return from_json(cls, fields)


_GROUPS = ("gather", "update", "overlap")
_LOCAL = {*_GROUPS, "attempt", "weights"}


def partition(plan: GatherPlan, world_size: int, sizes: Mapping[int, int] | None = None) -> Shares:
    """Divide the primaries over ranks.

    Args:
        plan: The plan.
        world_size: The number of ranks.
        sizes: Bytes by uid, equal on all ranks. Then the largest object is given first, each to the rank with
            the fewest bytes. Without them, sorted uids are dealt in turn.

    Returns:
        The uids of each rank. Without sizes, their numbers differ by one at most.
    """
    checks.instance(plan, GatherPlan, "plan")
    checks.integer(world_size, "partition: world_size")
    if sizes is not None and (
        not isinstance(sizes, Mapping) or None in map(checks.as_integer, sizes.values())
    ):
        raise InputError(f"partition: sizes must be bytes by uid, got {checks.kind(sizes)}")
    if sizes is None:
        return deal(sorted(plan.primary), [0] * world_size)
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for uid in sorted(plan.primary, key=lambda u: (-sizes.get(u, 0), u)):
        rank = min(range(world_size), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(uid)
        loads[rank] += sizes.get(uid, 0)
    return tuple(tuple(sorted(share)) for share in shares)


def backfill(plan: GatherPlan, statuses: Sequence[Mapping[int, Status]]) -> Shares:
    """Divide the next round of reserves over ranks.

    As many reserves are taken, in the plan's order, as primaries are missing; none is taken twice.
    """
    checks.instance(plan, GatherPlan, "plan")
    for share in checks.as_list(statuses, "statuses"):
        checks.instance(share, Mapping, "statuses of a rank")  # type: ignore[type-abstract]
    attempted = {uid for share in statuses for uid in share}
    accepted = {uid for share in statuses for uid, status in share.items() if status is Status.OK}
    missing = max(0, len(plan.primary) - len(accepted))
    more = [uid for uid in plan.reserve if uid not in attempted][:missing]
    return deal(more, [len(share) for share in statuses])


def deal(uids: Iterable[int], attempted: Sequence[int]) -> Shares:
    """Deal uids in turn, first to the ranks that have attempted the fewest."""
    checks.sizes(attempted, "attempted", 0)
    checks.integer(len(attempted), "the number of ranks")
    order = sorted(range(len(attempted)), key=lambda rank: (attempted[rank], rank))
    shares: list[list[int]] = [[] for _ in attempted]
    for number, uid in enumerate(_uids("uids", uids)):
        shares[order[number % len(order)]].append(uid)
    return tuple(tuple(share) for share in shares)


def _uids(name: str, uids: Any) -> list[int]:
    found = checks.items(uids, f"plan: {name}", "uids")
    if len(found) > MAX_UIDS:
        raise InputError(f"plan: {name} has {len(found)} uids, at most {MAX_UIDS} are possible")
    for uid in found:
        if (number := checks.as_integer(uid)) is None or not 0 <= number <= MAX_INT:
            raise InputError(f"plan: {name}: uid {uid!r:.40} must be an integer from 0 to 2^63-1")
    return list(map(int, found))


def _check_choices(owner: Any, where: str) -> None:
    """Check the fields of a dataclass that have a few known values."""
    for name, hint in get_type_hints(type(owner)).items():
        if get_origin(hint) is Literal:
            checks.one_of(getattr(owner, name), get_args(hint), f"{where}: {name}")


def _number(owner: Any, where: str, name: str, least: float, most: float, *, below: bool = False) -> None:
    """Check a number and store it as a float, so that 1 and 1.0 have one digest."""
    value = checks.as_number(getattr(owner, name))
    if value is None or not least <= value <= most or (below and value == most):
        upper = f"below {most:g}" if below else f"at most {most:g}"
        raise InputError(
            f"{where}: {name} must be from {least:g} and {upper}, got {getattr(owner, name)!r:.80}"
        )
    object.__setattr__(owner, name, value)
