"""Learning-rate schedules, by their numbers."""

from __future__ import annotations

import inspect
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megalith import SGD, Adam, Constant, Momentum, Piecewise, PolynomialDecay, Uniform, Warmup
from megalith.errors import InputError
from megalith.table.schedules import rate_at

NOT_RATES = [-0.1, math.nan, math.inf, -math.inf, "0.1", None, True]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # linear by default, and stays at its end
        (PolynomialDecay(0.5, 10, 0.0), {0: 0.5, 1: 0.45, 5: 0.25, 9: 0.05, 10: 0, 11: 0, 10**9: 0}),
        (PolynomialDecay(1.0, 10), {10: 0.0001}),
        (PolynomialDecay(1.0, 10, 2.0), {0: 1.0, 5: 1.5, 10: 2.0, 20: 2.0}),
        (PolynomialDecay(1.0, 10, 0.2, power=2.0), {5: 0.25 * 0.8 + 0.2}),
        (PolynomialDecay(1.0, 10, 0.2, power=0.5), {9: math.sqrt(0.1) * 0.8 + 0.2}),
        (PolynomialDecay(1.0, 10, 0.2, power=0.0), {7: 1.0}),
        # stretched to the next multiple of 10 that the step has not passed: 11 is 11/20 of the way
        (
            PolynomialDecay(1.0, 10, 0.0, cycle=True),
            {0: 1.0, 9: 0.1, 10: 0.0, 11: 0.45, 20: 0.0, 21: 0.3, 25: 1 / 6},
        ),
        (Warmup(0.5, steps=4, start=0.1), {0: 0.1, 1: 0.2, 3: 0.4, 4: 0.5, 100: 0.5}),
        (Warmup(0.5, steps=4), {0: 0.0}),
        # the decay runs from step 0, also under the warmup: 1.0, 0.9, 0.8, ...
        (Warmup(PolynomialDecay(1.0, 10, 0.0), steps=2), {0: 0.0, 1: 0.45, 2: 0.8, 3: 0.7, 10: 0.0}),
        (Warmup(lambda step: step / 10, steps=4), {2: 0.1}),
        (Piecewise((10, 20), (0.3, 0.2, 0.1)), {0: 0.3, 9: 0.3, 10: 0.2, 19: 0.2, 20: 0.1}),
        (Piecewise((), (0.3,)), {10**9: 0.3}),
    ],
)
def test_a_schedule_gives_its_rates(schedule: Any, rates: dict[int, float]) -> None:
    for step, rate in rates.items():
        assert schedule(step) == pytest.approx(rate, abs=1e-15)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"decay_steps": 0}, "decay_steps"),
        ({"decay_steps": -5}, "decay_steps"),
        ({"power": math.nan}, "power"),
        ({"power": math.inf}, "power"),
        *[({"initial": rate}, "initial") for rate in NOT_RATES],
        *[({"end": rate}, "end") for rate in NOT_RATES],
    ],
)
def test_an_invalid_decay_raises(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"PolynomialDecay: {field}"):
        PolynomialDecay(**{"initial": 1.0, "decay_steps": 10, "end": 0.1, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [{"steps": 0}, {"steps": -1}, *[{"start": r} for r in NOT_RATES], *[{"then": r} for r in NOT_RATES]],
)
def test_an_invalid_warmup_raises(arguments: dict[str, Any]) -> None:
    field = next(iter(arguments))
    with pytest.raises(InputError, match=f"Warmup: {field}"):
        Warmup(**{"then": 0.5, "steps": 4, **arguments})


@pytest.mark.parametrize(
    ("boundaries", "rates", "message"),
    [
        ([10], [0.3], "1 boundaries need 2 rates"),
        ([10], [0.3, 0.2, 0.1], "1 boundaries need 2 rates"),
        ([20, 10], [0.3, 0.2, 0.1], "boundaries must ascend"),
        ([10, 10], [0.3, 0.2, 0.1], "boundaries must ascend"),
        *[([10], [0.3, rate], "rates must be a finite number") for rate in NOT_RATES],
    ],
)
def test_an_invalid_piecewise_raises(boundaries: Any, rates: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Piecewise(boundaries, rates)


@pytest.mark.parametrize(
    ("lr", "rate"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (lambda step: step * 0.1, 0.3),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (lambda: 0.25, 0.25),
        (lambda step=5: step, 3.0),
        (lambda *steps: len(steps), 1.0),
        (partial(lambda base, step: base + step, 1), 4.0),
        (partial(float, 0.75), 0.75),
        (torch.tensor(0.5).item, 0.5),
        (lambda: torch.tensor(0.5), 0.5),
        (Piecewise((), (2.0,)), 2.0),
        (Warmup(lambda: 1.0, steps=6), 0.5),
    ],
)
def test_a_rate_is_a_number_a_schedule_or_any_callable(lr: Any, rate: float) -> None:
    assert SGD(lr).rate(3) == pytest.approx(rate)


def test_numbers_of_numpy_and_tensors_are_numbers() -> None:
    """Given settings as numpy scalars and 0-d tensors, the objects equal those with Python's numbers."""
    half, ten = np.float32(0.5), np.int64(10)
    assert SGD(torch.tensor(0.5)) == SGD(half) == SGD(0.5)  # type: ignore[arg-type]
    assert type(SGD(half).lr) is float  # type: ignore[arg-type]
    betas: Any = (half, torch.tensor(0.25))
    assert Adam(0.5, betas, eps=half) == Adam(0.5, (0.5, 0.25), eps=0.5)  # type: ignore[arg-type]
    assert Momentum(0.1, half) == Momentum(0.1, 0.5)  # type: ignore[arg-type]
    assert Uniform(-half, half) == Uniform(-0.5, 0.5)  # type: ignore[arg-type]
    decay = PolynomialDecay(half, ten, torch.tensor(0.25), half)  # type: ignore[arg-type]
    assert decay == PolynomialDecay(0.5, 10, 0.25, 0.5)
    assert decay(np.int64(5)) == decay(torch.tensor(5)) == decay(5)  # type: ignore[arg-type]
    assert Warmup(half, ten, half) == Warmup(0.5, 10, 0.5)  # type: ignore[arg-type]
    assert Piecewise((ten,), (half, half)) == Piecewise((10,), (0.5, 0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [True, torch.ones(2), torch.tensor(1j), torch.ones((), device="meta"), 10**400]
)
def test_what_is_not_one_number_is_rejected(value: Any) -> None:
    for made in (SGD, Constant, lambda x: Adam(0.1, eps=x)):
        with pytest.raises(InputError, match=r"(lr|value|eps) must be a finite number"):
            made(value)
    with pytest.raises(InputError, match=r"betas must be in \[0, 1\)"):
        Adam(0.1, (value, 0.9))


@pytest.mark.parametrize(
    "lr", [PolynomialDecay(1.0, 10), Warmup(partial(max, 0.5), 4), lambda step: 0.1, torch.tensor(0.5).item]
)
def test_the_signature_of_a_callable_is_read_once(lr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes many times as long as the rate itself."""
    optimizer = SGD(lr)
    expected = [optimizer.rate(step) for step in range(3)]
    copied = pickle.loads(pickle.dumps(SGD(PolynomialDecay(1.0, 10))))

    def read(*_: Any) -> Any:
        raise AssertionError("the signature was read again")

    monkeypatch.setattr(inspect, "signature", read)
    assert [optimizer.rate(step) for step in range(3)] == expected
    assert copied.rate(5) == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize(
    "lr",
    [lambda step, epoch: 0.1, lambda *, epoch: 0.1, lambda step, *, epoch: 0.1, PolynomialDecay],
)
def test_a_callable_that_needs_other_arguments_is_rejected_at_construction(lr: Any) -> None:
    with pytest.raises(InputError, match=r"SGD: lr must be .* callable of the step or of no argument"):
        SGD(lr)
    with pytest.raises(InputError, match="Warmup: then must be"):
        Warmup(lr, steps=1)


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, "fast", None, torch.ones(2), [0.1]], ids=repr)
def test_a_callable_must_give_a_usable_rate(rate: Any) -> None:
    with pytest.raises(InputError, match="learning rate at step 7"):
        rate_at(lambda step: rate, 7)
