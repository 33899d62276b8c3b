import pytest

from reference.sampler import Sampler


@pytest.fixture
def sampler() -> Sampler:
    return Sampler()
