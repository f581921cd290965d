"""The ServingPrecision contract: how servers store the weights of a segment, and what training sees of it.

Servers hold codes of a few bits instead of weights. So that a model is trained for what will be served,
lookups return a view of the stored weights, while the stored rows stay as they are: optimizer steps,
assignments, scans, checkpoints and snapshots work on them.

    lookup                          returns
    with a step (training)          `trained` of the stored weights
    without a step (evaluation)     `served` of the stored weights, which is what a server returns

`ServingView` applies the precisions of the segments of a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from torch import Tensor


class ServingPrecision(ABC):
    """A serving precision with codes: `FixedPoint` or `OneBit`.

    Attributes:
        name: Its name in exports and config files.
        depends_on_step: Whether the view of training changes with the step.
    """

    name: ClassVar[str]
    depends_on_step: ClassVar[bool] = False

    @property
    @abstractmethod
    def unit(self) -> float:
        """The float32 that a server multiplies codes by; together with the name it decodes them."""

    @classmethod
    @abstractmethod
    def from_unit(cls, unit: float) -> Self:
        """Return a precision that encodes and decodes with a unit; settings of training are the defaults.

        Args:
            unit: The `unit` of a precision of this class.

        Returns:
            The precision.

        Raises:
            InputError: No precision has this unit.
        """

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Return the size of the codes of a row.

        Args:
            dim: Number of weights.

        Returns:
            Number of bytes.
        """

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Compute the codes of weights.

        Args:
            rows: float32 [n, dim].

        Returns:
            uint8 [n, code_bytes].
        """

    @abstractmethod
    def decode(self, codes: Tensor, dim: int) -> Tensor:
        """Compute the weights of codes.

        Args:
            codes: uint8 [n, code_bytes].
            dim: Number of weights.

        Returns:
            float32 [n, dim].
        """

    def served(self, rows: Tensor) -> Tensor:
        """Return what servers return for stored weights: the decoded codes.

        Args:
            rows: float32 [n, dim].

        Returns:
            float32 [n, dim].
        """
        return self.decode(self.encode(rows), rows.shape[1])

    @abstractmethod
    def trained(self, rows: Tensor, step: int) -> Tensor:
        """Return what training sees of stored weights.

        Args:
            rows: float32 [n, dim].
            step: The global step, from 0.

        Returns:
            float32 [n, dim].
        """

    @abstractmethod
    def native_view(self, step: int | None) -> tuple[int, float, float]:
        """Return how the native module computes a view (native/serving_view.hpp).

        Args:
            step: The global step for `trained`; None for `served`.

        Returns:
            The number of the view and its two numbers, float32.
        """

    def slope(self, step: int) -> float:
        """Return the factor of gradients that does not depend on weights, for the native module.

        Args:
            step: The global step, from 0.

        Returns:
            The largest factor of `gradient`, a float32.
        """
        return 1.0

    def gradient(self, grads: Tensor, rows: Tensor, step: int) -> Tensor:
        """Compute the gradients of stored weights from those of what training sees.

        Args:
            grads: float32 [n, dim], the gradients of `trained`.
            rows: float32 [n, dim], the stored weights.
            step: The global step, from 0.

        Returns:
            float32 [n, dim]; `grads` itself for a straight-through estimator.
        """
        return grads
