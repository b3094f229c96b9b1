"""Short ways to run federations in tests."""

import functools
import signal

import pytest


@pytest.fixture
def go(tmp_path):
    """Run ``go(PluginClass, (OtherClass, options), "name", **config)`` on digits, in this process."""
    from tests import support  # imports torch, without which the process is quicker that starts those of make test

    return functools.partial(support.run, tmp_path)


@pytest.fixture
def toy(tmp_path):
    """Like ``go``, on two quadratics: f_i = |w - c_i|^2 / 2, c = (2, 0) and (0, 4), lr 0.5, no momentum, two steps."""
    from tests import support

    return functools.partial(support.run_toy, tmp_path)


@pytest.fixture
def interruptible():
    """Let runs be interrupted even where the tests are a shell's background job, which ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
