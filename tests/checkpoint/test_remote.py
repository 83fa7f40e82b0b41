"""checkpoint.remote: complete checkpoints are uploaded, and a run can continue from the upload."""

import contextlib
import json
import logging
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import tiny
from tests.failure_parts import inject
from tests.programs import finish_ranks, started_ranks
from tests.ranks import run_ranks
from tests.runs import settings
from trainer.checkpoint.__main__ import main
from trainer.checkpoint.evaluations import Evaluations, State
from trainer.checkpoint.listing import Listing
from trainer.checkpoint.manifest import MANIFEST, verify, write_text
from trainer.checkpoint.open_checkpoint import verified
from trainer.checkpoint.remote import Remote
from trainer.checkpoint.store import Store
from trainer.config import KeepBest
from trainer.errors import UserError
from trainer.files.address import Address
from trainer.run_dir.claim import RunDir, claim


def _save(store: Store, step: int, names: tuple[str, ...] = ("a.txt", "b.txt")) -> Path:
    directory = store.new_directory(step)
    files = {name: write_text(directory / name, f"{name} {step}") for name in names}
    return store.commit(step, "full", files, "")


def _run(root: Path, run_id: str = "one", **keeps: Any) -> tuple[Store, Remote]:
    store = Store(root / "run" / "checkpoints", run_id)
    store.root.mkdir(parents=True, exist_ok=True)
    return store, remote_of(_address(root), store, **keeps)


def remote_of(address: Address, store: Store, **keeps: Any) -> Remote:
    """Return the remote of a separate launch."""
    evaluations = Evaluations.read(store.root.parent)
    return Remote(address, store, tiny.settings(**keeps), evaluations)


def _address(root: Path) -> Address:
    return Address(f"file://{root / 'there'}")


def _steps_there(root: Path) -> list[str]:
    return sorted(path.parent.name for path in (root / "there").glob("checkpoints/*/manifest.json"))


def _wait(until: Callable[[], Any], timeout_s: float = 10) -> None:
    for _ in range(int(timeout_s * 100)):
        if until():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_the_newest_is_uploaded_and_the_same_number_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    evaluations = Evaluations(tmp_path / "run")
    for step, loss in ((10, 1.0), (20, 3.0), (30, 2.0), (40, 2.0), (50, 2.0)):
        evaluations.add(State("", step), {"loss": loss})
    evaluations.write()
    store, remote = _run(tmp_path, keep_last=1, keep_best=KeepBest("loss", "min"), keep_every=40)
    (tmp_path / "run" / "config.yaml").write_text("seed: 3")
    for step in (10, 20, 30, 40, 50):
        _save(store, step)
        remote.follow(step)
        remote.finish(10)
        assert remote.metrics() == {"usage/remote_behind": 0.0}
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000040", "step_00000050"]
    there = Listing(_address(tmp_path) / "checkpoints", "one")
    for directory in there.directories():
        verify(directory)
    assert (tmp_path / "there" / "config.yaml").read_text() == "seed: 3"
    assert sorted(path.name for path in (tmp_path / "there" / "checkpoints").iterdir()) == _steps_there(
        tmp_path
    )


def test_a_failing_store_is_reported_once_retried_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.checkpoint.remote._FIRST_PAUSE_S", 0.01)
    store, remote = _run(tmp_path)
    put, tried = Address.put, []

    def failing(address: Address, file: Path) -> None:
        tried.append(address.name)
        if len(tried) < 6 and address.name == "b.txt":
            raise UserError(f"{address} cannot be reached: OSError: no space left")
        put(address, file)

    monkeypatch.setattr(Address, "put", failing)
    with caplog.at_level(logging.INFO):
        _save(store, 10)
        begin = time.monotonic()
        remote.follow(10)
        assert time.monotonic() - begin < 1
        _wait(lambda: _steps_there(tmp_path))
        remote.finish(10)
    assert sorted(tried) == ["a.txt", *5 * ["b.txt"]], "what has arrived is not put twice"
    messages = [record.message for record in caplog.records if "no space left" in record.message]
    assert len(messages) == 1 and "The newest uploaded checkpoint is that of step 0" in messages[0]
    assert "accepts uploads again and contains step 10" in caplog.text


def test_a_truncated_upload_gets_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, remote = _run(tmp_path)
    monkeypatch.setattr(Address, "put", lambda address, file: address.write(file.read_bytes()[:-1]))
    _save(store, 10)
    remote.follow(10)
    _wait(lambda: "has 7 of 8 bytes after the upload" in caplog.text)
    assert not _steps_there(tmp_path)


def test_the_end_of_a_run_waits_for_the_upload_and_reports_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, remote = _run(tmp_path)
    _save(store, 10)
    remote.follow(10)
    remote.finish(10)
    gate = threading.Event()
    monkeypatch.setattr(Address, "put", lambda address, file: gate.wait(60))
    path = _save(store, 20)
    remote.follow(20)
    _wait(lambda: remote.copying)
    assert remote.metrics() == {"usage/remote_behind": 10.0}
    for step in (30, 40):
        _save(store, step)
        store.prune(tiny.settings(keep_last=1), Evaluations(tmp_path), spared=remote.copying)
    assert path.exists(), "what is being copied stays"
    begin = time.monotonic()
    with caplog.at_level(logging.INFO):
        remote.finish(0.3)
    assert 0.2 < time.monotonic() - begin < 5
    assert "contains step 10; step 20 is only in" in caplog.text
    gate.set()


def test_a_suspended_launch_stops_uploading_after_another_has_resumed_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, first = _run(tmp_path)
    _save(store, 10)
    first.follow(10)
    first.finish(10)
    half = tmp_path / "there" / "checkpoints" / "step_00000011"
    half.mkdir()
    (half / "a.txt").write_text("left by a kill")
    second = remote_of(_address(tmp_path), store)
    second.follow()
    second.finish(10)
    assert not half.exists(), "it has no manifest"
    _save(store, 20)
    first.follow(20)
    first.finish(10)
    assert "this run uploads no more files" in caplog.text
    assert _steps_there(tmp_path) == ["step_00000010"]
    second.follow(20)
    second.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010", "step_00000020-2"]


def test_nothing_is_mixed_with_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, remote = _run(tmp_path)
    _save(store, 10)
    remote.follow(10)
    remote.finish(10)
    other = remote_of(_address(tmp_path), Store(tmp_path / "other" / "checkpoints", "two"))
    _save(Store(tmp_path / "other" / "checkpoints", "two"), 15)
    other.follow(15)
    other.finish(10)
    assert "belongs to another run, one" in caplog.text
    assert _steps_there(tmp_path) == ["step_00000010"]


def _claimed(path: Path, resume: str | None, remote: str) -> RunDir:
    with ExitStack() as held:
        return claim(str(path), resume, held, 1, remote)


def test_a_new_run_dir_continues_the_run_at_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remote = _run(tmp_path)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    _save(store, 10)
    remote.follow(10)
    remote.finish(10)
    address = str(_address(tmp_path))
    claimed = _claimed(tmp_path / "new", "auto", address)
    assert claimed.run_id == "one" and not claimed.used
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert _claimed(tmp_path / "new", "auto", address).run_id == "one"
    for run_dir, resume in ((tmp_path / "third", None), (tmp_path / "third", "auto")):
        if resume:
            _save(Store(run_dir / "checkpoints", "three"), 1)
        with pytest.raises(UserError, match="already contains a different run, one; set "):
            _claimed(run_dir, resume, address)
    assert _claimed(tmp_path / "fourth", None, f"file://{tmp_path / 'elsewhere'}").run_id != "one"
    monkeypatch.setattr("trainer.checkpoint.remote._FIRST_PAUSE_S", 0.0)
    with pytest.raises(UserError, match=r"nosuch://b/run\.json cannot be reached: ValueError"):
        _claimed(tmp_path / "fifth", "auto", "nosuch://b")
    assert _claimed(tmp_path / "third", "auto", "nosuch://b").run_id == "three", "it has a checkpoint here"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/x",
        "s3://bucket/run[12]",  # the run there would delete the checkpoints of run1 and run2, too
    ],
)
def test_an_address_has_no_password_and_no_pattern(url: str) -> None:
    with pytest.raises(
        UserError, match=r"checkpoint\.remote is .*, but must be an address that fsspec supports"
    ):
        settings(f"checkpoint.remote='{url}'")
    assert (
        settings("checkpoint.remote=abfs://box@mine.example/x").checkpoint.remote
        == "abfs://box@mine.example/x"
    )


def _resume_from_there(root: Path) -> None:
    remote = str(_address(root))
    state = tiny.train_state(sharded=True)
    first = tiny.checkpointer(root / "first", format="sharded", remote=remote, state=state)
    for _ in range(2):
        tiny.train(state, 2)
        first.save(state)
        first.finish_remote()
    expected = tiny.everything(state)
    other = tiny.train_state(sharded=True, seed=5)
    if tiny.facts().rank == 0:
        shutil.rmtree(root / "first")
    second = tiny.checkpointer(root / "second", format="sharded", remote=remote)
    assert tiny.restore(second, other, "auto")
    tiny.assert_same(tiny.everything(other), expected)
    assert second._store.saved_after > 0, "saves here are newer, also by a clock behind the lost machine's"
    if tiny.facts().rank == 0:  # a byte flips there: the one before is taken
        path = next((root / "there" / "checkpoints" / "step_00000004").glob("optim-00000*"))
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    assert tiny.restore(second, other, "auto")
    assert other.progress.step == 2


def test_resumes_only_from_the_address(tmp_path: Path) -> None:
    run_ranks(_resume_from_there, 2, tmp_path)


def test_the_files_of_all_ranks_are_uploaded_and_the_manifest_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remote = _run(tmp_path)
    _save(store, 10, SHARDS)
    put = Address.put

    def checked(address: Address, file: Path) -> None:
        assert not (address.parent / MANIFEST).exists()
        put(address, file)

    monkeypatch.setattr(Address, "put", checked)
    remote.follow()
    remote.finish(10)
    assert _steps_there(tmp_path) == ["step_00000010"]
    verify(_address(tmp_path) / "checkpoints" / "step_00000010")


def _save_there(root: Path) -> None:
    state = tiny.train_state()
    tiny.train(state, 2)
    checkpointer = tiny.checkpointer(root / "first", remote=str(_address(root)), state=state)
    checkpointer.save(state)
    checkpointer.finish_remote()


@pytest.mark.slow
def test_commands_take_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_save_there, 1, tmp_path)
    address = str(_address(tmp_path))
    for run in (address, f"{address}/checkpoints/step_00000002"):
        assert main(["show", run]) == main(["verify", run]) == 0
    net = tiny.Net()
    tiny.load_weights(net, run)
    here = verified(tmp_path / "first" / "checkpoints" / "step_00000002").weights(False)
    assert all(here[name].equal(value) for name, value in net.state_dict().items())
    assert main(["convert", run, str(tmp_path / "w.safetensors"), "--to", "safetensors"]) == 0
    (tmp_path / "there" / "checkpoints" / "step_00000002" / MANIFEST).unlink()
    capsys.readouterr()
    assert main(["verify", run]) == 2
    assert "it has no manifest.json" in capsys.readouterr().err
    assert main(["verify", "nosuch://bucket/x"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@contextlib.contextmanager
def _bucket(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return an address of this kind that started programs can access."""
    if kind == "file":
        yield str(_address(root))
        return
    pytest.importorskip("s3fs", reason="pip install 'ringmaster-trainer[s3]'")
    moto: Any = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "mockkeyid",
        "AWS_SECRET_ACCESS_KEY": "mocksecret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"))
    yield "s3://bucket/run"
    server.stop()


SHARDS = tuple(f"model-{rank:05d}-of-00002.safetensors" for rank in range(2))
TRAIN = (
    *("train.py", "strategy=fsdp", "checkpoint=sharded", "logger=jsonl", "train.log_every_steps=10"),
    *("train.eval_every_epochs=0", "checkpoint.every_steps=20", "checkpoint.every_epochs=null"),
    *("train.max_steps=60", "checkpoint.timeout_s=100"),
)


def _hash_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "result.json").read_text())["param_sha256"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the hash of the uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("calm")
    assert [each.code for each in finish_ranks(2, *TRAIN, f"run_dir={run_dir}")] == [0, 0]
    return _hash_of(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_run_whose_machine_is_lost_continues_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, calm: str
) -> None:
    """All ranks are killed and the run directory is deleted; the resumed run equals an uninterrupted one."""
    with _bucket(tmp_path, kind, monkeypatch) as address:
        remote = f"checkpoint.remote={address}"
        slow = inject("slow", step=45, seconds=30)
        with started_ranks(2, *TRAIN, remote, *slow, f"run_dir={tmp_path / 'lost'}") as ranks:
            _wait(lambda: (Address(address) / "checkpoints/step_00000040/manifest.json").exists(), 60)
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        shutil.rmtree(tmp_path / "lost")
        ended = finish_ranks(2, *TRAIN, remote, "resume=auto", f"run_dir={tmp_path / 'found'}")
        assert [each.code for each in ended] == [0, 0], ended[0].output
        resumed = re.search(rf"resumed from {address}/checkpoints/step_000000(\d\d)", ended[0].output)
        assert resumed and int(resumed[1]) < 60
    assert _hash_of(tmp_path / "found") == calm
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "found" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == list(range(10, 61, 10)), "the metrics of the lost part, too"
    assert not any(
        "mocksecret" in path.read_text(errors="replace") for path in tmp_path.rglob("*.*") if path.is_file()
    )
