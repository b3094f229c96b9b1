"""A plugin read as a text: the commands of its README, and how long its code is."""

from __future__ import annotations

import pytest

from fedcore.base.errors import ConfigError
from fedcore.testing import commands_of, lines_of_code


def test_the_commands_of_a_readme_are_read_as_the_command_line_reads_them(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "`fedcore train --rounds 3 --plugin fedprox --set fedprox.mu=0.5 --projection --plugin solo`, then\n"
        "    fedcore train --clients 2\n`fedcore train` alone is none\n"
    )
    one, other = commands_of(readme)
    assert one.plugins == {"fedprox": {"mu": 0.5}, "solo": {}}
    assert (one.rounds, one.projection, other.clients, other.plugins) == (3, True, 2, {})
    readme.write_text("    fedcore train --rounds none\n")
    with pytest.raises(ConfigError, match="rounds"):
        commands_of(readme)


def test_imports_comments_docstrings_and_excluded_classes_are_no_code(tmp_path, monkeypatch):
    source = (
        '"""Of\na module."""\n\nimport os  # one\n\n# none\nclass Options:\n    x = 1\n\n\ndef f():\n    """Two."""\n'
    )
    (tmp_path / "counted_module.py").write_text(source + "    return (\n        os\n    )\n")
    monkeypatch.syspath_prepend(tmp_path)
    import counted_module

    assert lines_of_code(counted_module) == 6
    assert lines_of_code(counted_module, "Options") == 4
