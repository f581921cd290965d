"""Fixtures for tests of ops."""

from tests.op_implementations import implementation as implementation
