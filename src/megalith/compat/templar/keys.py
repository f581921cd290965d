"""Keys and buckets: where Templar's peers put their objects, as the locations and stores of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalith.errors import InputError
from megalith.gather.plan import Location
from megalith.ops import checks
from megalith.storage.object_store import ObjectStore, open_object_store

_BUCKET_FIELDS = ("name", "account_id", "access_key_id", "secret_access_key")


def gradient_key(window: int, uid: int, version: str) -> str:
    """Return the key of a peer's gradient object.

    Args:
        window: The window.
        uid: The peer.
        version: The version of Templar that the run uses.

    Returns:
        "gradient-WINDOW-UID-vVERSION.pt".
    """
    checks.integer(window, "window", 0)
    checks.integer(uid, "uid", 0)
    return f"gradient-{window}-{uid}-v{checks.text(version, 'version')}.pt"


def aggregator_key(window: int, version: str) -> str:
    """Return the key of an aggregator object.

    Args:
        window: The window.
        version: The version of Templar that the run uses.

    Returns:
        "aggregator-WINDOW-vVERSION.pt".
    """
    return f"aggregator-{checks.integer(window, 'window', 0)}-v{checks.text(version, 'version')}.pt"


def peer_locations(window: int, uids: Iterable[int], version: str) -> dict[int, Location]:
    """Return where the gradients of peers are: each in the bucket of its peer.

    Args:
        window: The window.
        uids: The peers.
        version: The version of Templar that the run uses.

    Returns:
        `GatherPlan.locations`; the store of uid 7 is called "uid-7".
    """
    wanted = checks.items(uids, "uids", "integers")
    return {uid: Location(gradient_key(window, uid, version), f"uid-{uid}") for uid in wanted}


def peer_stores(commitments: Mapping[int, Any]) -> dict[str, ObjectStore]:
    """Open the buckets of peers for reading.

    Args:
        commitments: The bucket of each uid, as Templar reads it from the chain: an object or a dict with
            `name`, `account_id`, `access_key_id` and `secret_access_key`. The endpoint is that of Cloudflare
            R2; an `endpoint` entry overrides it.

    Returns:
        The stores by the names that `peer_locations` uses.
    """
    if not isinstance(commitments, Mapping):
        raise InputError(f"commitments must be buckets by uid, got {checks.kind(commitments)}")
    stores = {}
    for uid, bucket in commitments.items():
        values = {
            name: bucket.get(name) if isinstance(bucket, Mapping) else getattr(bucket, name, None)
            for name in (*_BUCKET_FIELDS, "endpoint")
        }
        for name in _BUCKET_FIELDS:
            if not isinstance(values[name], str) or not values[name]:
                raise InputError(f"bucket of uid {uid}: {name} must be text, got {values[name]!r:.40}")
        stores[f"uid-{uid}"] = open_object_store(
            f"s3://{values['name']}",
            endpoint=values["endpoint"] or f"https://{values['account_id']}.r2.cloudflarestorage.com",
            region="auto",
            access_key_id=values["access_key_id"],
            secret_access_key=values["secret_access_key"],
        )
    return stores
