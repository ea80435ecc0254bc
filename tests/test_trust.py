"""Whose word is needed before a configuration counts, and how long it lasts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rpcagent import config
from rpcagent.config import ConfigError

TEXT = "[agents.fixer]\n"


def written(folder: Path, text: str = TEXT, name: str = config.FILE_NAME) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_that_came_with_the_workspace_says_nothing_until_it_is_trusted(tmp_path: Path):
    store = tmp_path / "store"
    path = written(tmp_path)
    found = config.find(tmp_path, None, False, store)
    assert (found.config, found.trusted, found.path) == (config.EMPTY, False, path)
    assert found.digest == config.digest_of(TEXT.encode())
    assert found.note == (
        f"{path} is not used: nobody has trusted its present content ({found.digest}). To see what it asks for: rpcagent "
        f"check --workspace {tmp_path} --store {store}. To trust it: rpcagent trust --workspace {tmp_path} --store {store}"
    )
    config.trust(path, found.digest, store)
    found = config.find(tmp_path, None, False, store)
    assert (found.trusted, found.note, list(found.config.agents)) == (True, "", ["fixer"])
    assert (store / "trusted").stat().st_mode & 0o777 == 0o600


def test_a_changed_file_is_not_trusted_any_more(tmp_path: Path):
    path = written(tmp_path)
    config.trust(path, config.digest_of(path.read_bytes()), tmp_path / "store")
    path.write_text(TEXT + "#\n")
    assert not config.find(tmp_path, None, False, tmp_path / "store").trusted
    path.write_text(TEXT)
    assert config.find(tmp_path, None, False, tmp_path / "store").trusted


def test_the_same_content_elsewhere_is_not_trusted(tmp_path: Path):
    path = written(tmp_path)
    config.trust(path, config.digest_of(path.read_bytes()), tmp_path / "store")
    other = tmp_path / "other"
    other.mkdir()
    written(other)
    assert not config.find(other, None, False, tmp_path / "store").trusted


def test_trust_on_the_command_line_needs_no_record(tmp_path: Path):
    written(tmp_path)
    assert list(config.find(tmp_path, None, True, tmp_path / "store").config.agents) == ["fixer"]
    assert not (tmp_path / "store").exists()


def test_a_file_that_is_named_is_trusted_and_the_only_one(tmp_path: Path):
    written(tmp_path)
    named = written(tmp_path, "[agents.own]\n", "own.toml")
    found = config.find(tmp_path, named, False, tmp_path / "store")
    assert (list(found.config.agents), found.trusted, found.note) == (["own"], True, "")


def test_where_there_is_no_file_there_is_nothing_to_say(tmp_path: Path):
    assert config.find(tmp_path, None, False, tmp_path / "store") == config.NOTHING


def test_a_file_that_nobody_trusts_cannot_keep_the_daemon_from_starting(tmp_path: Path):
    os.mkfifo(tmp_path / config.FILE_NAME)
    found = config.find(tmp_path, None, False, tmp_path / "store")
    assert (found.config, found.trusted) == (config.EMPTY, False)
    assert found.note == f"a file in the workspace is not used: {tmp_path / config.FILE_NAME}: this is not a file"


def test_a_trusted_file_that_cannot_be_used_is_refused(tmp_path: Path):
    path = written(tmp_path, "[agents.a]\nmodle = 1\n")
    with pytest.raises(ConfigError, match="did you mean `model`"):
        config.find(tmp_path, None, True, tmp_path / "store")
    config.trust(path, config.digest_of(path.read_bytes()), tmp_path / "store")
    with pytest.raises(ConfigError):
        config.find(tmp_path, None, False, tmp_path / "store")


def test_a_link_in_place_of_the_record_of_trust_is_not_followed(tmp_path: Path):
    path = written(tmp_path)
    digest = config.digest_of(path.read_bytes())
    config.trust(path, digest, tmp_path / "store")
    record = tmp_path / "store" / config.TRUSTED
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    assert not config.find(tmp_path, None, False, tmp_path / "store").trusted
