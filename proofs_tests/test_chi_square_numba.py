"""The million draws per rule of test_chi_square with the Numba backend, in a file of its own: processes share files."""

from __future__ import annotations

import pytest
import torch

from optimized.backends import choose_backend
from proofs_tests.test_chi_square import RULES, check_target_law
from reference.api import RheoConfig


@pytest.mark.lossless
@pytest.mark.parametrize("rule", RULES)
def test_the_numba_path_emits_the_target_law(rule, record_property):
    check_target_law(rule, choose_backend("numba", torch.device("cpu"), RheoConfig()), record_property)
