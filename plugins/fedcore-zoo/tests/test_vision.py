"""torchvision is imported late, and its defects are explained."""

import os

from fedcore.base.process import search_path
from tests.support import run_code


def run_python(code, path=None):
    return run_code(code, PYTHONPATH=os.pathsep.join(filter(None, [path and str(path), search_path()])))


def test_torchvision_is_imported_late_and_always_works():
    code = (
        "import sys, fedcore.data, fedcore_zoo; assert not any(m.startswith('torchvision') for m in sys.modules);"
        "from fedcore_zoo.vision import load_torchvision as load;"
        "assert load() is load() is sys.modules['torchvision'];"
        "import torchvision.transforms.functional, torchvision.datasets"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_a_working_torchvision_is_left_alone(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("")
    code = (
        "import torch, fedcore_zoo.vision as v; t = v.load_torchvision(); print(t.__file__);"
        "assert not v._declared and not hasattr(torch.ops.torchvision, 'nms')"
    )
    result = run_python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path) in result.stdout


def test_a_torchvision_broken_otherwise_is_explained(tmp_path):
    (tmp_path / "torchvision").mkdir()
    broken = "raise RuntimeError('operator torchvision::roi_align does not exist')"
    (tmp_path / "torchvision/__init__.py").write_text(broken)
    result = run_python("import fedcore_zoo.vision as v; v.load_torchvision()", tmp_path)
    assert "ConfigError: torchvision cannot be imported: operator torchvision::roi_align" in result.stderr
