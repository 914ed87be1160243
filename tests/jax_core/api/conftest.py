"""The programs of these tests are small and run once: they are compiled without most optimisations, which takes half the time. A
case with ``quick_compile=False`` and a test that reads the compiled program have them."""

import pytest
from attention_cases import quick_compiles


@pytest.fixture(autouse=True)
def without_optimisations():
    with quick_compiles():
        yield
