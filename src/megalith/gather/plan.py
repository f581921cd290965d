"""The plan: all that ranks must agree on before a download starts. Built on rank 0, sent to all, compared
by digest.

Nothing in it is derived from a rank's own state, and it holds no credentials: places are named, and each
rank knows the stores behind the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from math import isfinite
from typing import Any

from megalith.errors import InputError
from megalith.gather.fields import canonical, digest, show_time
from megalith.gather.settings import OverlapConfig, UpdateConfig
from megalith.storage.strict_json import MAX_INT, JsonFields, as_utc, parse_json_object

VERSION = 1
MAX_UIDS = 1 << 20
MAX_BYTES = 1 << 28
"""Bytes of an encoded plan at most."""


@dataclass(frozen=True)
class Location:
    """Where a peer's object lies: a key in a store that each rank knows by this name."""

    key: str
    store: str = "default"

    def __post_init__(self) -> None:
        if not 0 < len(self.key) <= 1024 or not 0 < len(self.store) <= 128:
            raise InputError(f"a location needs a key and a store, got {self.key!r:.80}, {self.store!r:.80}")


def payload_key(run: str, window: int, uid: int) -> str:
    """Where a peer puts its payload unless a plan says otherwise."""
    return f"payloads/{run}/{window}/{uid}.gather"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One window's gather. Repeated uids count once; a uid in both lists is a primary."""

    run: str
    window: int
    schema: str
    """The digest of the model's schema."""
    primary: tuple[int, ...]
    """The peers that are wanted."""
    reserve: tuple[int, ...] = ()
    """Who takes the place of a primary that fails, in this order."""
    attempt: int = 0
    locations: Mapping[int, Location] = field(default_factory=dict)
    """By uid; peers without one are looked for at `payload_key` in the store "default"."""
    time_min: datetime | None = None
    time_max: datetime | None = None
    """When an object may have been written, both ends included. Times without a zone are UTC."""
    deadline: float = 90.0
    """Seconds for the primaries, from the moment a rank has the plan; each round of reserves has as many."""
    grace: float = 3.0
    """Seconds after time_max until which a missing object is still waited for."""
    max_object_bytes: int = 1 << 32
    max_value: float = 1e6
    """Magnitude of a value at most."""
    min_peers: int = 1
    """Fewer accepted peers skip the window."""
    backfill_rounds: int = 1
    """Rounds of reserves at most."""
    memory_budget: int = 256 << 20
    """Bytes that fetching and the update may each hold at once on a rank."""
    accept_baseline: bool = False
    """Whether objects in the layout of earlier systems are converted."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)

    def __post_init__(self) -> None:
        primary = tuple(dict.fromkeys(_uids("primary", self.primary)))
        taken = set(primary)
        reserve = tuple(u for u in dict.fromkeys(_uids("reserve", self.reserve)) if u not in taken)
        for name in ("time_min", "time_max"):
            moment = getattr(self, name)
            object.__setattr__(self, name, None if moment is None else as_utc(moment))
        known = set(primary) | set(reserve)
        object.__setattr__(self, "primary", primary)
        object.__setattr__(self, "reserve", reserve)
        object.__setattr__(self, "locations", {u: at for u, at in self.locations.items() if u in known})
        self._check()

    def _check(self) -> None:
        if not 0 < len(self.run) <= 128 or "/" in self.run:
            raise InputError(f"run must have 1 to 128 characters and no '/', got {self.run!r:.140}")
        for name, least in (
            ("window", 0),
            ("attempt", 0),
            ("max_object_bytes", 1),
            ("min_peers", 1),
            ("backfill_rounds", 0),
            ("memory_budget", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INT:
                raise InputError(f"{name} must be a whole number, {least} or more, got {value!r}")
        for name in ("deadline", "grace", "max_value"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise InputError(f"{name} must be a finite number, 0 or more, got {value!r}")
        if not 0 < self.max_value <= 1e30:
            raise InputError(f"max_value must be above 0 and at most 1e30, got {self.max_value!r}")
        if self.time_min is not None and self.time_max is not None and self.time_min > self.time_max:
            raise InputError(f"time_min {self.time_min} is after time_max {self.time_max}")

    @cached_property
    def digest(self) -> str:
        """The plan's name: SHA-256 of its canonical writing. Partials, artifacts and log lines carry it."""
        return digest(self.to_json())

    @property
    def digest64(self) -> int:
        """64 bits of the digest as an int64, for ranks to compare in one reduction."""
        return int.from_bytes(bytes.fromhex(self.digest[:16]), "big", signed=True)

    def location(self, uid: int) -> Location:
        """Where this peer's object lies."""
        return self.locations.get(uid) or Location(payload_key(self.run, self.window, uid))

    def next_attempt(self) -> Plan:
        """The same plan for another attempt, after a rank was lost."""
        return replace(self, attempt=self.attempt + 1)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return {
            "version": VERSION,
            "run": self.run,
            "window": self.window,
            "attempt": self.attempt,
            "schema": self.schema,
            "primary": list(self.primary),
            "reserve": list(self.reserve),
            "locations": [[uid, at.store, at.key] for uid, at in sorted(self.locations.items())],
            "time_min": None if self.time_min is None else show_time(self.time_min),
            "time_max": None if self.time_max is None else show_time(self.time_max),
            "deadline": float(self.deadline),
            "grace": float(self.grace),
            "max_object_bytes": self.max_object_bytes,
            "max_value": float(self.max_value),
            "min_peers": self.min_peers,
            "backfill_rounds": self.backfill_rounds,
            "memory_budget": self.memory_budget,
            "accept_baseline": self.accept_baseline,
            "update": self.update.to_json(),
            "overlap": self.overlap.to_json(),
        }

    def to_bytes(self) -> bytes:
        """The canonical writing."""
        return canonical(self.to_json())

    @classmethod
    def from_bytes(cls, text: bytes) -> Plan:
        """Reads what `to_bytes` wrote. Raises InputError naming the field that is wrong."""
        if len(text) > MAX_BYTES:
            raise InputError(f"a plan has at most {MAX_BYTES} bytes, this one {len(text)}")
        return cls.from_json(parse_json_object(text, lambda problem: InputError(f"plan: {problem}")))

    @classmethod
    def from_json(cls, fields: JsonFields) -> Plan:
        """Reads what `to_json` gave."""
        if fields.integer("version") != VERSION:
            fields.fail("version", f"must be {VERSION}")
        locations = {}
        for each in fields.array("locations"):
            if (
                not isinstance(each, list)
                or len(each) != 3
                or isinstance(each[0], bool)
                or [type(part) for part in each] != [int, str, str]
            ):
                fields.fail("locations", "must hold [uid, store, key]")
            locations[each[0]] = Location(each[2], each[1])
        plan = cls(
            run=fields.string("run", 128),
            window=fields.integer("window"),
            attempt=fields.integer("attempt"),
            schema=fields.sha256("schema"),
            primary=tuple(fields.integers("primary")),
            reserve=tuple(fields.integers("reserve")),
            locations=locations,
            time_min=fields.time("time_min"),
            time_max=fields.time("time_max"),
            deadline=fields.number("deadline"),
            grace=fields.number("grace"),
            max_object_bytes=fields.integer("max_object_bytes", 1),
            max_value=fields.number("max_value"),
            min_peers=fields.integer("min_peers", 1),
            backfill_rounds=fields.integer("backfill_rounds"),
            memory_budget=fields.integer("memory_budget", 1),
            accept_baseline=fields.boolean("accept_baseline"),
            update=UpdateConfig.from_json(fields.object("update")),
            overlap=OverlapConfig.from_json(fields.object("overlap")),
        )
        fields.allow_only(*plan.to_json())
        return plan


def _uids(name: str, uids: Iterable[int]) -> list[int]:
    found = list(uids)
    if len(found) > MAX_UIDS:
        raise InputError(f"{name} has {len(found)} uids, {MAX_UIDS} are the most")
    for uid in found:
        if isinstance(uid, bool) or not isinstance(uid, int) or not 0 <= uid <= MAX_INT:
            raise InputError(f"{name}: uid {uid!r:.40} must be a whole number from 0 to 2^63-1")
    return found
