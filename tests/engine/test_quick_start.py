"""What a start leaves out, and what is as before behind it."""

import gc
from importlib import metadata

import pytest

from diptych.shared.engine.quick_start import Distributions, quick_start


@pytest.mark.parametrize("is_on", [True, False])
def test_everything_is_as_before_behind_a_start(is_on: bool) -> None:
    before = metadata.packages_distributions
    (gc.enable if is_on else gc.disable)()
    try:
        with quick_start():
            assert not gc.isenabled()
            assert isinstance(metadata.packages_distributions(), Distributions)
        assert gc.isenabled() == is_on
        assert metadata.packages_distributions is before
    finally:
        gc.enable()


def test_all_packages_are_read_for_another_name_only() -> None:
    found = Distributions(lambda: {"PIL": ["pillow"]})
    assert found["torch"] == found.get("torch") == ["torch"]
    assert "PIL" not in found
    assert found["PIL"] == ["pillow"]
    assert found.get("no_such_package", []) == []
    with pytest.raises(KeyError, match="no_such_package"):
        found["no_such_package"]
