"""Policies of tables in the config of a run: text or a section of the TOML file becomes policy objects.

    eviction = "ttl=2592000, capacity=1000000, capacity.score=lfu"

    [tables.user.eviction]
    ttl = { seconds = 2592000, per_slot = { 3 = 86400 } }
    capacity = 1000000

Both forms give a policy by its name in `megalith.table.policies`. A number is its first argument;
`capacity.score=lfu`, or a section, gives arguments by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from megalith.errors import InputError, UnknownNameError
from megalith.models import TablePolicies
from megalith.table.policies import ADMISSIONS, EVICTIONS, Admission, Capacity, Eviction

KEYS = ("admission", "eviction")


def parse_admission(given: str | Mapping[str, Any] | None, where: str) -> Admission | None:
    """Build an admission policy.

    Args:
        given: Text such as "min_count=3", or settings by the name of the policy. None or empty: no policy.
        where: The key of the config, for messages.

    Returns:
        The policy, or None.

    Raises:
        UnknownNameError: No policy or argument has this name; the message lists the known ones.
        InputError: A value is wrong, or there are several policies.
    """
    policies = _policies(given, ADMISSIONS, where)
    if len(policies) > 1:
        raise InputError(f"config: {where} has {len(policies)} policies, but a table has at most one")
    return policies[0] if policies else None


def parse_eviction(given: str | Mapping[str, Any] | None, where: str) -> tuple[Eviction, ...]:
    """Build eviction policies.

    Args:
        given: Text such as "ttl=86400, capacity=1000000", or settings by the name of the policy. None or
            empty: no policies.
        where: The key of the config, for messages.

    Returns:
        The policies.

    Raises:
        UnknownNameError: No policy or argument has this name; the message lists the known ones.
        InputError: A value is wrong.
    """
    return tuple(_policies(given, EVICTIONS, where))


def parse_tables(
    tables: Mapping[str, Any], admission: Admission | None, eviction: tuple[Eviction, ...]
) -> dict[str, TablePolicies]:
    """Build the policies of the tables that have a section [tables.NAME].

    Args:
        tables: Content of the sections, by table.
        admission: Admission policy of a table whose section has none.
        eviction: Eviction policies of a table whose section has none.

    Returns:
        Policies by table.

    Raises:
        UnknownNameError: A section has an unknown key; the message lists the known ones.
        InputError: A value is wrong.
    """
    found = {}
    for table, given in tables.items():
        where = f"tables.{table}"
        if not isinstance(given, Mapping):
            raise InputError(f"config: [{where}] must be a section")
        for key in given:
            if key not in KEYS:
                raise UnknownNameError(f"config: unknown key {where}.{key} (known: {', '.join(KEYS)})")
        found[table] = TablePolicies(
            parse_admission(given["admission"], f"{where}.admission") if "admission" in given else admission,
            parse_eviction(given["eviction"], f"{where}.eviction") if "eviction" in given else eviction,
        )
    return found


def needs_passes(eviction: tuple[Eviction, ...]) -> bool:
    """Return whether eviction policies need passes over the table.

    Args:
        eviction: The policies of a table.

    Returns:
        Whether there is one besides `Capacity`, which acts when rows are written.
    """
    return any(not isinstance(policy, Capacity) for policy in eviction)


def _policies(given: Any, known: Mapping[str, Any], where: str) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str):
        given = _read(given, where)
    if not isinstance(given, Mapping):
        raise InputError(
            f"config: {where} must be text such as {next(iter(known))}=100, or a section, got {given!r}"
        )
    for name in given:
        if name not in known:
            raise UnknownNameError(f"config: {where}: unknown policy {name!r} (known: {', '.join(known)})")
    return [_policy(known[name], settings, f"{where}.{name}") for name, settings in given.items()]


def _read(text: str, where: str) -> dict[str, dict[str, Any]]:
    """Read text such as "capacity=100, capacity.score=lfu": arguments by policy; "" is the first one."""
    found: dict[str, dict[str, Any]] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (each.strip() for each in part.partition("="))
        name, _, argument = key.partition(".")
        if not equals or not name or not value:
            raise InputError(f"config: {where} must be POLICY=VALUE,..., got {text!r}")
        if argument in found.setdefault(name, {}):
            raise InputError(f"config: {where} has {key} twice: {text!r}")
        found[name][argument] = _value(value)
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _policy(kind: Any, given: Any, where: str) -> Any:
    """Build a policy from the value of its first argument, or from arguments by name."""
    known = list(inspect.signature(kind).parameters)
    settings = dict(given) if isinstance(given, Mapping) else {"": given}
    if "" in settings:
        first = settings.pop("")
        if known[0] in settings:
            raise InputError(f"config: {where}.{known[0]} is given twice")
        settings[known[0]] = first
    for key in settings:
        if key not in known:
            raise UnknownNameError(f"config: {where}: unknown key {key!r} (known: {', '.join(known)})")
    for field in fields(kind):
        if field.name not in settings and field.default is MISSING:
            raise InputError(f"config: {where} needs {field.name}")
    if isinstance(settings.get("per_slot"), Mapping):  # keys of TOML and JSON are text
        settings["per_slot"] = {
            int(slot) if str(slot).isdecimal() else slot: age for slot, age in settings["per_slot"].items()
        }
    try:
        return kind(**settings)
    except InputError as error:
        raise InputError(f"config: {where}: {error}") from None
