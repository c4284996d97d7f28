"""A run at a URL is the run that a directory would hold, also when training was cut off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import s3fs
from botocore.exceptions import EndpointConnectionError
from lightning.pytorch import Callback, Trainer

from storage.store import Store
from tests.vcal_dist.training_kit import assert_same, config, curve, make_store
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.posterior import FILE
from vcal_dist.run_place import RunPlace, run_place
from vcal_dist.training import train


class Cut(RuntimeError):  # noqa: N818 - an event
    pass


class CutOff(Callback):
    """Ends training in the middle, as a lost machine would: nothing is written or sent afterwards."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if module.schedule.steps == self.steps:
            raise Cut


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("store") / "s.zarr")


def at_s3(store: Store, url: str) -> Config:
    return config(store.url, url)


def names(url: str) -> set[str]:
    root = url.removeprefix("s3://")
    found = s3fs.S3FileSystem(use_listings_cache=False).find(root)
    return {str(one).removeprefix(f"{root}/") for one in found}


def test_training_goes_on_from_what_the_object_store_has(store: Store, s3_url: str, tmp_path: Path) -> None:
    url, here = f"{s3_url}/my runs/a", tmp_path / "here"
    with pytest.raises(Cut):
        train(at_s3(store, url), progress=False, callbacks=[CutOff(8)])
    assert {"config.yaml", "rows.json", "checkpoints/last.safetensors"} <= names(url)
    assert FILE not in names(url)
    said: list[str] = []
    train(at_s3(store, url), progress=False, say=said.append)
    assert f"going on after step 7 of the run in {url}" in said  # the first stage had ended
    train(config(store.url, here), progress=False)
    s3fs.S3FileSystem().get(url, str(tmp_path / "there"), recursive=True)
    assert_same(tmp_path / "there", here)
    assert curve(tmp_path / "there") == curve(here)
    assert {one.partition("/")[0] for one in names(url)} == {one.name for one in here.iterdir()} - {"run.lock"}


def test_a_run_that_is_done_there_is_only_loaded(store: Store, s3_url: str) -> None:
    url, said = f"{s3_url}/done", list[str]()
    first = train(at_s3(store, url), progress=False)
    second = train(at_s3(store, url), progress=False, say=said.append, callbacks=[CutOff(1)])
    assert f"the run in {url} is done already" in said[0]
    assert second.summary() == first.summary()


def test_another_configuration_is_refused_there_too(store: Store, s3_url: str) -> None:
    url = f"{s3_url}/other"
    train(at_s3(store, url), progress=False)
    with pytest.raises(ConfigError, match="was begun with another configuration"):
        train(config(store.url, url, seed=7), progress=False)


def test_only_what_changed_is_sent_and_the_posterior_last(s3_url: str) -> None:
    sent: list[str] = []
    with run_place(f"{s3_url}/sent") as place:
        put = place.files.put_file

        def recorded(source: str, target: str) -> None:
            sent.append(target.rpartition("/")[2])
            put(source, target)

        place.files.put_file = recorded
        place.path.mkdir()
        (place.path / "checkpoints").mkdir()
        for name in (FILE, "a.txt", "run.lock", "b.1f.partial", "checkpoints/last", "z.txt"):
            (place.path / name).write_text(name)
        place.send()
        assert sent == ["a.txt", "z.txt", "last", FILE]
        (place.path / "z.txt").write_text("more")
        place.send()
        assert sent[4:] == ["z.txt"]


def test_a_lost_connection_does_not_end_training_but_is_told(s3_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with run_place(f"{s3_url}/lost") as place:
        place.path.mkdir()
        (place.path / "a").write_text("a")
        put = place.files.put_file
        place.files.put_file = _refuse
        with caplog.at_level(logging.WARNING, "vcal_dist"):
            place.send(must=False)
        assert "the next checkpoint tries again" in caplog.text
        with pytest.raises(ConfigError, match=r"cannot write s3://.*/lost/a: .*no route"):
            place.send()
        place.files.put_file = put
        place.send()
        assert place.has("a")


def _refuse(*_: Any) -> None:
    raise EndpointConnectionError(endpoint_url="no route")  # as s3fs lets it through: no OSError


def test_local_places_are_the_directory_itself(tmp_path: Path) -> None:
    for output in (tmp_path / "a", f"file://{tmp_path}/a"):
        with run_place(output) as place:
            assert isinstance(place, RunPlace)
            assert place.path == tmp_path / "a"
            place.fetch()
            place.send()
            assert not place.path.exists()


def test_an_unknown_kind_of_url_is_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"output is nowhere://x: .*use a local path or an s3:// URL"):
        train(at_s3(store, "nowhere://x"), progress=False)


def test_a_bucket_that_is_not_there_is_told_before_training(store: Store, s3_url: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/run"):
        train(at_s3(store, "s3://no-such-bucket/run"), progress=False)
