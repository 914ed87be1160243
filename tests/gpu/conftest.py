"""``make test-gpu`` on a machine without a GPU says so, test by test."""

import pytest

from tests.gpu.jobs import need


@pytest.fixture(autouse=True)
def a_gpu():
    need(1)
