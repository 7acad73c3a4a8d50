"""One browser for all tests here. They are run by `tox -e browser`, and fail where there is none."""

from collections.abc import Iterator

import pytest

from .chromium import Chromium


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
