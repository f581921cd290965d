"""Settings of tables in the config of a run, from text or TOML sections.

    eviction = "ttl=2592000, capacity=1000000, capacity.score=lfu"
    initializer = "normal=0, normal.std=0.01"
    precision = "bfloat16"
    serving = "fixed_point=0.5"
    table_optimizer = "adam"
    table_lr = 0.01
    table_options = "eps=1e-6, bias_correction=row, betas=0.9:0.99"

    [tables.user]
    optimizer = ["ftrl=0.1", "adam=0.01, adam.eps=1e-6"]
    precision = ["float32", "bfloat16"]
    [tables.user.eviction]
    ttl = { seconds = 2592000, per_slot = { 3 = 86400 } }
    capacity = 1000000

Text and sections give a policy, optimizer, initializer or serving precision by its name. A number is its
first argument; `capacity.score=lfu`, or a section, gives arguments by name. A list has one value for each
segment of a row.

`table_options` holds arguments of the optimizer's class. delay_compensated takes `base=NAME` and `strength`;
its other settings are those of the base.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from megalith.errors import InputError, UnknownNameError
from megalith.models import TableSettings
from megalith.table.config import MISSING as MISSING_IDS
from megalith.table.config import PRECISIONS, ROUNDINGS, SERVING_FLOATS, SERVING_PRECISIONS
from megalith.table.initializers import (
    Constant,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from megalith.table.optimizers import OPTIMIZERS, DelayCompensated, Optimizer
from megalith.table.policies import ADMISSIONS, EVICTIONS, Admission, Capacity, Eviction
from megalith.table.serving_precision import ServingPrecision

TABLE_KEYS = tuple(field.name for field in fields(TableSettings))


def parse_admission(given: str | Mapping[str, Any] | None, where: str) -> Admission | None:
    admission: Admission | None = _only(given, ADMISSIONS, where, "policies")
    return admission


def parse_eviction(given: str | Mapping[str, Any] | None, where: str) -> tuple[Eviction, ...]:
    return tuple(_policies(given, EVICTIONS, where))


def parse_precision(given: Any, where: str) -> str | list[str]:
    for each in given if isinstance(given, list) and given else [given]:
        check_one_of(each, tuple(PRECISIONS), where)
    found: str | list[str] = given
    return found


def parse_rounding(given: Any, precision: str | list[str], where: str) -> str:
    check_one_of(given, ROUNDINGS, where)
    stored = precision if isinstance(precision, list) else [precision]
    if given != "nearest" and all(each == "float32" for each in stored):
        raise InputError(
            f"config: {where} is {given!r}, but float32 is not rounded: set precision to float16 or bfloat16"
        )
    rounding: str = given
    return rounding


def parse_serving(given: Any, where: str) -> ServingPrecision | str | None:
    if isinstance(given, str) and given in SERVING_FLOATS:
        return given
    if isinstance(given, str) and given.strip() and "=" not in given:
        known = (*SERVING_FLOATS, *(f"{name}=VALUE" for name in SERVING_PRECISIONS))
        check_one_of(given, known, where)
    found: ServingPrecision | None = _only(given, SERVING_PRECISIONS, where, "precisions")
    return found


INITIALIZERS = {
    "zeros": Zeros,
    "ones": Ones,
    "constant": Constant,
    "uniform": Uniform,
    "normal": Normal,
    "truncated_normal": TruncatedNormal,
}


def parse_initializer(given: Any, where: str) -> Initializer | None:
    found: Initializer | None = _only(_named(given), INITIALIZERS, where, "initializers")
    return found


def _parse_optimizer(given: Any, where: str, lr: float) -> Optimizer | None:
    given = _named(given)
    if isinstance(given, str):
        given = _read_policies(given, where, "OPTIMIZER")
    if isinstance(given, Mapping):  # without a rate, that of all tables
        given = {
            name: {"lr": lr, **settings}
            if isinstance(settings, Mapping) and settings.keys().isdisjoint(("", "lr"))
            else settings
            for name, settings in given.items()
        }
    known = {name: kind for name, kind in OPTIMIZERS.items() if kind is not DelayCompensated}
    found: Optimizer | None = _only(given, known, where, "optimizers")
    return found


def _named(given: Any) -> Any:
    """A name alone stands for its default arguments."""
    return {given.strip(): {}} if isinstance(given, str) and given.strip() and "=" not in given else given


def parse_tables(tables: Mapping[str, Any], shared: TableSettings, lr: float) -> dict[str, TableSettings]:
    """Build the settings of the tables that have a section [tables.NAME]."""
    found = {}
    for table, given in tables.items():
        where = f"tables.{table}"
        if not isinstance(given, Mapping):
            raise InputError(f"config: [{where}] must be a section")
        for key in given:
            if key not in TABLE_KEYS:
                raise UnknownNameError(f"config: unknown key {where}.{key} (known: {', '.join(TABLE_KEYS)})")
        found[table] = _settings(given, shared, where, lr)
    return found


def _settings(given: Mapping[str, Any], shared: TableSettings, where: str, lr: float) -> TableSettings:
    def own(key: str, parse: Callable[..., Any], missing: Any = None) -> Any:
        return parse(given[key], f"{where}.{key}") if key in given else missing

    def own_by_segment(key: str, parse: Callable[..., Any]) -> Any:
        if isinstance(given.get(key), list):
            return [parse(each, f"{where}.{key}") for each in given[key]]
        return own(key, parse)

    found = {
        "admission": own("admission", parse_admission, shared.admission),
        "eviction": own("eviction", parse_eviction, tuple(shared.eviction)),
        "precision": own("precision", parse_precision),
    }
    stored = found["precision"] or str(shared.precision)
    found["rounding"] = own("rounding", lambda value, key: parse_rounding(value, stored, key))
    found["serving"] = own_by_segment("serving", parse_serving)
    found["initializer"] = own_by_segment("initializer", parse_initializer)
    found["optimizer"] = own_by_segment("optimizer", lambda value, key: _parse_optimizer(value, key, lr))
    for key, known in (("missing", MISSING_IDS), ("dist_type", ("roundrobin", "hash_roundrobin"))):
        if key in given:
            check_one_of(given[key], known, f"{where}.{key}")
    for key in ("trainable", "huge_pages", "deterministic"):
        if not isinstance(given.get(key, True), bool):
            raise InputError(f"config: {where}.{key} must be true or false, got {given[key]!r}")
    size = given.get("device_bytes")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise InputError(f"config: {where}.device_bytes must be an integer, or 0 for no limit; got {size!r}")
    return TableSettings(**{**given, **found})


def needs_passes(eviction: tuple[Eviction, ...]) -> bool:
    return any(not isinstance(policy, Capacity) for policy in eviction)


def check_one_of(value: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"config: {where} must be one of {', '.join(known)}, got {value!r}")


def _only(given: Any, known: Mapping[str, Any], where: str, nouns: str) -> Any:
    found = _policies(given, known, where, nouns)
    if len(found) > 1:
        raise InputError(f"config: {where} has {len(found)} {nouns}, but a table has at most one")
    return found[0] if found else None


def _policies(given: Any, known: Mapping[str, Any], where: str, nouns: str = "policies") -> list[Any]:
    noun = "policy" if nouns == "policies" else nouns.removesuffix("s")
    if given is None:
        return []
    if isinstance(given, str):
        given = _read_policies(given, where, noun.upper())
    if not isinstance(given, Mapping):
        raise InputError(
            f"config: {where} must be text such as {next(iter(known))}=100, or a section, got {given!r}"
        )
    for name in given:
        if name not in known:
            raise UnknownNameError(f"config: {where}: unknown {noun} {name!r} (known: {', '.join(known)})")
    return [_policy(known[name], settings, f"{where}.{name}") for name, settings in given.items()]


def _read_policies(text: str, where: str, noun: str) -> dict[str, dict[str, Any]]:
    """Read text such as "capacity=100, capacity.score=lfu": arguments by policy; "" is the first one."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in _pairs(text, where, noun):
        name, _, argument = key.partition(".")
        if not name:
            raise InputError(f"config: {where} must be {noun}=VALUE,..., got {text!r}")
        if argument in found.setdefault(name, {}):  # "ttl." is "ttl" too
            raise InputError(f"config: {where} has {key} twice: {text!r}")
        found[name][argument] = _value(value)
    return found


def _pairs(text: str, where: str, noun: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of text such as "a=1, b=2"."""
    seen = set()
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key or not value:
            raise InputError(f"config: {where} must be {noun}=VALUE,..., got {text!r}")
        if key in seen:
            raise InputError(f"config: {where} has {key} twice: {text!r}")
        seen.add(key)
        yield key, value


def _value(text: str) -> Any:
    """A number, true or false, a tuple of values separated by colons, or the text itself."""
    if ":" in text:
        return tuple(map(_value, text.split(":")))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
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
        if not known:
            raise InputError(f"config: {where} has no argument, got {first!r}")
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


TABLE_OPTIONS = "train.table_options"


def build_optimizer(name: str, lr: float, options: str | None) -> Optimizer:
    settings = {key: _value(value) for key, value in _pairs(options or "", TABLE_OPTIONS, "SETTING")}
    if OPTIMIZERS[name] is not DelayCompensated:
        return _build(name, lr, settings)
    base, strength = settings.pop("base", None), settings.pop("strength", None)
    bases = [each for each, kind in OPTIMIZERS.items() if kind is not DelayCompensated]
    if base not in bases:
        raise InputError(
            f"config: {TABLE_OPTIONS} must have base=NAME for delay_compensated, one of {', '.join(bases)}; "
            f"got {base!r}"
        )
    inner = _build(base, lr, settings)
    try:
        return DelayCompensated(inner) if strength is None else DelayCompensated(inner, strength)
    except InputError as error:
        raise InputError(f"config: {TABLE_OPTIONS}: {error}") from None


def _build(name: str, lr: float, settings: dict[str, Any]) -> Optimizer:
    kind: Any = OPTIMIZERS[name]
    known = list(inspect.signature(kind).parameters)
    if "lr" in settings:
        raise InputError(f"config: {TABLE_OPTIONS} has lr; set train.table_lr (--table-lr) instead")
    for key in settings:
        if key not in known:
            others = [each for each in known if each != "lr"]
            raise UnknownNameError(
                f"config: {TABLE_OPTIONS}: {name} has no setting {key!r} "
                f"(known: {', '.join(others) or 'none'})"
            )
    try:
        made: Optimizer = kind(lr=lr, **settings)
    except InputError as error:
        raise InputError(f"config: {TABLE_OPTIONS}: {error}") from None
    return made
