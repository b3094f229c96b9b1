"""Run libraries in environments of their own and write the fixtures of ``tests/oracles`` again: ``run.py NAME ...``.

Each script ``run_NAME.py`` runs in the environment of ``requirements/NAME.txt``, without fedcore. What it writes is
then compared with fedcore in this environment: a case that is said to differ gets fedcore's value. A verdict that is
not right any more ends the run with exit code 1, and its file stays as it was.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE.parent / "peers")]

from cases import dumped  # noqa: E402
from environments import EnvironmentFailed, python_of  # noqa: E402

from tests.oracles import calls, compare  # noqa: E402


def main() -> None:
    names = sorted(path.stem.removeprefix("run_") for path in HERE.glob("run_*.py"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", choices=[*names, "all"], metavar="NAME", help=f"all, or of {', '.join(names)}"
    )
    parser.add_argument("--envs", type=Path, default=HERE / ".envs", help="where the environments are or will be made")
    chosen = parser.parse_args()
    failed = [name for name in (names if "all" in chosen.names else chosen.names) if not renew(name, chosen.envs)]
    if failed:
        sys.exit(f"not written: {', '.join(failed)}")


def renew(name: str, environments: Path) -> bool:
    """Write a library's fixtures again; returns False, and says why, where that did not work."""
    try:
        python = python_of(name, environments, HERE / "requirements")
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-W", "ignore", str(HERE / "start.py"), str(HERE / f"run_{name}.py"), folder]
        if subprocess.run(command, check=False).returncode:  # noqa: S603 - our own words
            return False
        done = [written(path) for path in sorted(Path(folder).glob("*.json"))]
        return all(done)


def written(path: Path) -> bool:
    """Write a fixture with fedcore's values where it differs; returns False where a verdict is not right."""
    fixture, wrong, worst = compare.read(path), [], 0.0
    for case in fixture["cases"]:
        got = calls.compute(case)
        if case.get("differs"):
            case["fedcore"] = got
        elif compare.numbers(got).shape == compare.numbers(case["library"]).shape:
            worst = max(worst, float(abs(compare.numbers(got) - compare.numbers(case["library"])).max()))
        if problem := compare.problem(case, got):
            wrong.append(problem)
    differ = sum("differs" in case for case in fixture["cases"])
    agree = len(fixture["cases"]) - differ
    print(
        f"{path.stem}: {agree} agree (at most {worst:.1e} apart), {differ} differ as said, {len(wrong)} are not as said"
    )
    print("\n".join(f"  {problem}" for problem in wrong), end="\n" if wrong else "")
    if not wrong:
        (compare.FIXTURES / path.name).write_text(dumped(fixture), encoding="utf-8")
    return not wrong


if __name__ == "__main__":
    main()
