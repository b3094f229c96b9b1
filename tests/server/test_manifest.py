"""The manifest: a mapping from clients to versions that comes back from a checkpoint."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fedcore.server.state import Manifest

VERSIONS = st.dictionaries(st.integers(0, 50), st.none() | st.integers(0, 1000), max_size=12)


@settings(deadline=None, max_examples=60)
@given(VERSIONS, VERSIONS)
def test_it_is_the_mapping_that_it_was_made_of(versions, later):
    manifest = Manifest.of(versions)
    assert dict(manifest) == versions
    assert list(manifest) == sorted(versions)
    assert dict(Manifest.from_tensors(manifest.tensors())) == versions
    renewed = manifest.updated(later)
    assert dict(renewed) == versions | later
    assert dict(manifest) == versions, "the committed one stays"
    assert renewed.changed(manifest) == sorted(
        client for client in later if client not in versions or versions[client] != later[client]
    )


def test_what_it_does_not_hold():
    manifest = Manifest.of({3: 1, 5: None})
    for client in (-1, 0, 4, 6):
        assert client not in manifest
    assert manifest[5] is None
    assert Manifest.of(manifest) is manifest
    assert repr(manifest) == "Manifest({3: 1, 5: None})"
