"""The peer's side of a store: put a payload where plans look for it, and look at one from afar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megalith.errors import StoreError
from megalith.gather.compress import Compressed
from megalith.gather.payload import PRELUDE_BYTES, Header, Label, header_span, parse_header
from megalith.gather.plan import payload_key
from megalith.gather.status import Fault, Status
from megalith.gather.store import Store, persist, wait

_SLOWEST = 1 << 18  # bytes per second; an upload below this is stuck, and tried again


@dataclass(frozen=True)
class Published:
    """A payload in a store. written: False if the same payload was there already."""

    key: str
    digest: str
    bytes: int
    written: bool


def publish(
    store: Store,
    compressed: Compressed,
    label: Label,
    *,
    key: str | None = None,
    overwrite: bool = False,
    deadline: float = 300.0,
    directory: Path | None = None,
) -> Published:
    """Writes a peer's payload to a store; tried again until it is there or the deadline passes.

    key: `payload_key` of the label unless given. overwrite: replace what is there; otherwise another
    payload at the key raises StoreError, and the same one counts as done. directory: where the file is
    made. Raises StoreError when time is up; what was compressed can then go back into its feedback.
    """
    place = key or payload_key(label.run, label.window, label.uid)
    with TemporaryDirectory(prefix="gather-", dir=directory) as folder:
        path = Path(folder) / "payload"
        with open(path, "w+b") as file:
            header = compressed.write(file, label)
        try:
            written = wait(
                persist(
                    lambda limit: store.put(place, path, create=not overwrite, timeout=limit),
                    deadline=deadline,
                    request_timeout=30.0 + header.size / _SLOWEST,
                )
            )
        except Fault as fault:
            where = f"uid {label.uid}, window {label.window}"
            raise StoreError(f"{where}: not published: {fault.detail}") from None
    if not written and peek(store, place, deadline=deadline).digest != header.digest:
        raise StoreError(
            f"{place!r} holds another payload: a peer sends one per window (or use overwrite=True)"
        )
    return Published(place, header.digest, header.size, written)


def peek(store: Store, key: str, *, deadline: float = 60.0) -> Header:
    """The header of a payload in a store, verified, by two ranged reads. Raises Fault."""

    async def read() -> Header:
        info = await persist(lambda limit: store.head(key, timeout=limit), deadline=deadline)
        if info.size < PRELUDE_BYTES:
            raise Fault(Status.CORRUPT, f"{key!r} has {info.size} bytes, a payload {PRELUDE_BYTES} or more")

        async def first(length: int) -> bytes:
            return await persist(
                lambda limit: store.get_range(key, 0, length, etag=info.etag, timeout=limit),
                deadline=deadline,
            )

        header_bytes, size = header_span(await first(PRELUDE_BYTES))
        if size != info.size:
            raise Fault(Status.CORRUPT, f"{key!r} has {info.size} bytes, its prelude says {size}")
        return parse_header(await first(PRELUDE_BYTES + header_bytes))

    return wait(read())
