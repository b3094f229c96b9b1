"""Texts instead of images: which part of SciPy does a docstring describe?

Run it: python examples/text_topics.py [ROUNDS]

The texts lie on every machine that has fedcore: the docstrings of the installed SciPy, of statistics, signal
processing, optimisation and so on. Only the prose before the first section ("Parameters", ...) is read, and the parts'
own names are taken out of it. As another SciPy has other docstrings, figures compare only on one machine.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fedcore
from fedcore.data import Dataset
from fedcore_zoo import SequenceSamples, fixed_split

TOPICS = ("interpolate", "linalg", "ndimage", "optimize", "signal", "sparse", "spatial", "special", "stats")
VOCABULARY = 2000


def scipy_topics(data_dir: Path | None = None) -> Dataset:
    """Return SciPy's docstrings as token sequences: 9 classes, a fifth of them to test on."""
    spec = find_spec("scipy")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    texts = {text: topic for topic in range(len(TOPICS)) for text in _docstrings(root / TOPICS[topic])}
    words = [[word for word in re.findall(r"[a-z]{2,}", text.lower()) if word not in TOPICS] for text in texts]
    labels = list(texts.values())
    train, test = fixed_split(labels, 0.2)
    counts = Counter(word for i in train for word in words[i])
    known = {word: token for token, (word, _) in enumerate(counts.most_common(VOCABULARY))}

    def samples(positions: list[int]) -> SequenceSamples:
        tokens = [[known[word] for word in words[i] if word in known] for i in positions]
        return SequenceSamples.of(tokens, [labels[i] for i in positions])

    return Dataset(
        name="scipy-topics",
        train=samples(train.tolist()),
        test=samples(test.tolist()),
        num_classes=len(TOPICS),
        input_shape=(len(known),),
        class_names=TOPICS,
        model="embedding-bag",
    )


def _docstrings(folder: Path) -> list[str]:
    """Return the prose of the docstrings below a folder, from the source: nothing is imported."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        if "tests" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
            prose = re.split(r"\n[A-Z][A-Za-z ]+\n-{3,}", text or "")[0]
            if len(prose) > 80:
                found.append(prose)
    return found


def main(rounds: int = 10) -> fedcore.RunResult:
    config = fedcore.RunConfig(
        dataset="module:text_topics.scipy_topics", plugins={"fedprox": {}}, rounds=rounds, clients=8, lr=0.5
    )
    return fedcore.run(config, notify=report)


def report(event: str, details: Mapping[str, Any]) -> None:
    if event == "round":
        print(f"round {details['round'] + 1}: {details['metrics']['global']['accuracy']:.1%} of the test texts")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
