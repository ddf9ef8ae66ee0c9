"""Every call of a device's runtime to the system fails once, while processes die and are replaced.

What comes out is what comes out undisturbed; or the run ends with one line and its newest commit.
The places are found, not listed: see tools/conformance/faults/failing.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tools.conformance.faults
from bigbrain_fx.bundles.launch import RunError, RunOptions, run
from bigbrain_fx.supervisor import Event
from tests.support.bundles import copied, edit, edit_last, is_running, split_small
from tests.support.commit_disks import steps_in
from tests.support.excused import RUNTIME
from tests.support.places import lines_of, places as read_places

STEPS = 8
FAILING = Path(tools.conformance.faults.__file__).with_name("failing.py")
KILL_ONCE = '''
def kill_once(device, step):
    """End each device's process once; from the first on calls fail."""
    marks = Path(__file__).with_name("faults")
    mark = marks / f"struck-{device.name[1:]}"
    if step == 2 + int(device.name[1:]) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


HOOKS.on_step_end.append(kill_once)

if __name__'''


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = split_small(tmp_path_factory.mktemp("device-calls"))
    edit_last(made / "train.py", "if __name__", KILL_ONCE.lstrip("\n"))
    edit(made / "train.py", "from pathlib", "import failing\nimport os\nfrom pathlib")
    (made / "faults").mkdir()
    shutil.copy(FAILING, made / "failing.py")
    return made


def tried(bundle: Path, folder: Path) -> tuple[list[Event], str, dict[str, torch.Tensor]]:
    """Run it; return the events, what was said of its end, and what it saved."""
    copy, events, said = copied(bundle, folder), list[Event](), ""
    options = RunOptions(
        STEPS,
        spares=0,
        restarts=1000,
        hang_s=20.0,
        snapshot_every=1,
        save=folder / "out",
        logs=folder / "logs",
        commits=folder / "commits",
        commit_every=2,
    )
    try:
        run(copy, options, on_event=events.append)
    except RunError as error:
        said = str(error)
    tensors = dict[str, torch.Tensor]()
    for file in sorted((folder / "out").glob("*.safetensors")):
        tensors |= {f"{file.stem}/{name}": found for name, found in load_file(file).items()}
    return events, said, tensors


@pytest.mark.nightly
@pytest.mark.parametrize(("nth", "rounds", "places"), [(0, 1, 10), (0, 5, 26), (2, 5, 9)])
def test_each_call_fails_once(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nth: int,
    rounds: int,
    places: int,
) -> None:
    """A round goes on where the one before it failed, until a round meets no new call."""
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("BIGBRAIN_FAILING", str(marks))
    monkeypatch.setenv("BIGBRAIN_FAILING_NTH", "1000000")  # never
    _, calm, expected = tried(bundle, tmp_path / "calm")
    assert not calm
    assert expected
    monkeypatch.setenv("BIGBRAIN_FAILING_NTH", str(nth))
    for number in range(rounds):
        before = len(list(marks.iterdir()))
        folder = tmp_path / str(number)
        events, said, tensors = tried(bundle, folder)
        pids = [event["pid"] for event in events if event["event"] == "started"]
        assert not any(map(is_running, pids))
        steps = steps_in(folder / "commits")
        if not said:
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)
            warned = any(event["event"] == "at_risk" for event in events)
            assert max(steps) == STEPS or (warned and max(steps) >= 0)  # the last one failed
            if len(list(marks.iterdir())) == before:
                break
        else:
            assert "the process of device" in said
            assert not tensors or tensors.keys() == expected.keys()
    struck = [mark.name for mark in marks.iterdir()]
    assert len(struck) >= places, struck
    if not nth and rounds > 1:
        here = {path.name for path in (bundle / "runtime").iterdir()}  # not of another kind
        every = (place for place in read_places("runtime") if place.split()[0] in here)
        left = {place for place in every if not is_met(place, struck)}
        assert left <= RUNTIME.keys(), "strike what is new, or excuse it"


BY_CALL = {  # how the calls that are read in a file are met
    **dict.fromkeys((".open", "os.open", ".read_text", ".write_text", ".read_bytes"), "open"),
    **dict.fromkeys((".exists", ".is_dir", ".is_file", ".is_symlink", ".stat"), "stat"),
    **dict.fromkeys((".start", ".submit"), "thread"),
    ".iterdir": "listdir",
    ".rename": "replace",
    "os.write": "os.write",
}


def is_met(place: str, struck: Sequence[str]) -> bool:
    """Whether a place that was read in a file has failed."""
    file, function, call = place.split()
    name = BY_CALL.get(call, call.rpartition(".")[2])
    return any(f"{name} {file}:{line}" in struck for line in lines_of("runtime", file, function))
