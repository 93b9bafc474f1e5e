# SPDX-License-Identifier: Apache-2.0
"""The file of --api-key-file, and its union with the keys of --api-key."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from fastdeploy.config.api_keys import FIELDS, ApiKey, add_plain_keys, file_notes, read_api_key_file
from fastdeploy.config.args import ServeArgs, parse_serve_args
from fastdeploy.config.env import Env
from fastdeploy.core.errors import ConfigError

FULL = """
- name: research
  key: sesame/+=~!
  weight: 2
  max_sequences: 16
  tokens_per_minute: 60000
- {name: ops, key: ajar, admin: true, weight: 0.5}
"""


def parse(tmp_path: Path, content: str, *flags: str, env: Env | None = None) -> ServeArgs:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    file.chmod(0o600)
    return parse_serve_args(["demo", "--api-key-file", str(file), *flags], env)


def test_every_field_is_read(tmp_path: Path) -> None:
    assert parse(tmp_path, FULL).server.keys == (
        ApiKey("research", "sesame/+=~!", 2, 16, 60000),
        ApiKey("ops", "ajar", 0.5, admin=True),
    )


def test_keys_of_the_file_and_of_the_flag_add_up(tmp_path: Path) -> None:
    keys = parse(tmp_path, FULL, "--api-key", "plain", "--api-key", "plain", "--api-key", "other").server.keys
    assert [(key.name, key.key, key.weight, key.max_sequences, key.admin) for key in keys[2:]] == [
        ("key-1", "plain", 1, None, False),
        ("key-2", "other", 1, None, False),
    ]
    with_env = parse(tmp_path, FULL, env=Env(api_keys=("variable",))).server.keys
    assert [key.name for key in with_env] == ["research", "ops", "key-1"]


def test_without_a_file_plain_keys_are_named_by_number() -> None:
    keys = parse_serve_args(["demo", "--api-key", "a", "--api-key", "b"]).server.keys
    assert keys == (ApiKey("key-1", "a"), ApiKey("key-2", "b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a list of entries, each with a name and a key"),
        ("[]", "expected a list of entries"),
        ("name: a\nkey: b", "expected a list of entries"),
        ("- sesame", "entry 1: expected a mapping with name and key, got a value that is not shown"),
        ("- {name: a}", "entry 1, key: is missing"),
        ("- {key: sesame}", "entry 1, name: is missing"),
        ("- {name: a, key:}", "entry 1, key: is missing"),
        ("- {name: a, key: 5}", "entry 1, key: expected printable ASCII characters without spaces, got a value that"),
        ("- {name: a, key: se same}", "entry 1, key: expected printable ASCII"),
        ('- {name: a, key: "sesame\\n"}', "entry 1, key: expected printable ASCII"),
        ("- {name: a, key: 'sésame'}", "entry 1, key: expected printable ASCII"),
        ("- {name: a, key: ''}", "entry 1, key: expected printable ASCII"),
        ("- {name: a b, key: x}", "entry 1, name: expected 1 to 64 letters, digits, dots, hyphens or underscores"),
        ("- {name: 5, key: x}", "entry 1, name: expected 1 to 64 letters"),
        (f"- {{name: {'n' * 65}, key: x}}", "entry 1, name: expected 1 to 64 letters"),
        ("- {name: a, key: x, weight: 0}", "entry 1, weight: expected a number in [0.001, 1000], got 0"),
        ("- {name: a, key: x, weight: .nan}", "entry 1, weight: expected a number in [0.001, 1000], got nan"),
        ("- {name: a, key: x, weight: true}", "entry 1, weight: expected a number in [0.001, 1000], got True"),
        ("- {name: a, key: x, max_sequences: 0}", "entry 1, max_sequences: expected an integer of at least 1, got 0"),
        ("- {name: a, key: x, max_sequences: 1.5}", "entry 1, max_sequences: expected an integer of at least 1"),
        ("- {name: a, key: x, tokens_per_minute: '9'}", "entry 1, tokens_per_minute: expected an integer of at least"),
        ("- {name: a, key: x, admin: 1}", "entry 1, admin: expected true or false, got 1"),
        ("- {name: a, key: x, wieght: 1}", "entry 1, wieght: unknown field; did you mean 'weight'?"),
        ("- {name: a, key: x, zzz: 1}", "entry 1, zzz: unknown field; known fields: name, key, weight, "),
        ("- {name: a, key: x}\n- {name: b, key: x}", "entry 2, key: is the key of entry 1 as well"),
        ("- {name: a, key: x}\n- {name: a, key: y}", "entry 2, name: is the name of entry 1 as well"),
        ("- {name: a, name: b, key: x}", "name: is repeated in line 1"),
        ("- {name: a, key: 'sesame}", "is not valid YAML at line 1, column"),
        ("- {name: a, key: !sesame x}", "is not valid YAML at line 1, column"),
        ("- {name: a, key: *sesame}", "is not valid YAML at line 1, column"),
        ("[" * 5000, "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_file_entry_and_field(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, content)
    assert str(caught.value).startswith(f"--api-key-file: {tmp_path / 'keys.yaml'}: {message}")
    assert "sesame" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=f"--api-key-file: cannot read '{path}': "):
            parse_serve_args(["demo", "--api-key-file", str(path)])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML in UTF-8"):
        parse_serve_args(["demo", "--api-key-file", str(tmp_path / "binary")])


def test_a_key_or_name_may_not_be_in_the_file_and_in_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"api_key: key 2 is in --api-key-file as well, with the name 'research'"):
        parse(tmp_path, FULL, "--api-key", "x", "--api-key", "sesame/+=~!")
    with pytest.raises(ConfigError, match="api_key: key 1 is named 'key-1', which is a name in --api-key-file as well"):
        parse(tmp_path, "- {name: key-1, key: y}", "--api-key", "x")


@pytest.mark.parametrize("key", ["se same", "sésame", "sesame\n"])
def test_a_plain_key_that_no_client_could_send_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"api_key: .* printable ASCII characters without spaces") as caught:
        parse_serve_args(["demo", "--api-key", key])
    assert key not in str(caught.value)


def test_a_file_that_others_may_access_gets_a_note_at_start(tmp_path: Path) -> None:
    assert not [note for note in parse(tmp_path, FULL).notes if "api-key" in note]
    file = tmp_path / "keys.yaml"
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        [note] = parse_serve_args(["demo", "--api-key-file", str(file)]).notes
        assert note.startswith(f"--api-key-file {file} is accessible to other users (mode {mode:04o})")
    assert file_notes(str(file)) == (note,)


def test_no_representation_shows_a_key(tmp_path: Path) -> None:
    args = parse(tmp_path, FULL, "--api-key", "plainly")
    assert not any(key in repr(args) for key in ("sesame", "ajar", "plainly"))


VALUES = {
    "name": ["alice", "bob", "a.b_c-d", "", "x" * 64, 7, None, "ü", ["a"]],
    "key": ["k", "k2", "!~", "sesame sesame", "", 3.5, None, {"a": 1}],
    "weight": [1, 0.001, 1000, 1001, -1, "2", None, float("inf")],
    "max_sequences": [1, 10**9, 0, -3, 2.0, True, None],
    "tokens_per_minute": [1, 10**12, 0, "many", False, None],
    "admin": [True, False, "yes", 0, None],
    "unknown": [1],
}
VALID = {
    "name": VALUES["name"][:3] + VALUES["name"][4:5],
    "key": VALUES["key"][:3],
    "weight": [1, 0.001, 1000, None],
    "max_sequences": [1, 10**9, None],
    "tokens_per_minute": [1, 10**12, None],
    "admin": [True, False, None],
}


def is_valid(entries: list[dict[str, object]]) -> bool:
    """Say independently of the code whether a file is valid."""
    for entry in entries:
        if "name" not in entry or "key" not in entry or not set(entry) <= set(FIELDS):
            return False
        for name, value in entry.items():
            if not any(type(value) is type(known) and value == known for known in VALID[name]):
                return False
    names, keys = [entry["name"] for entry in entries], [entry["key"] for entry in entries]
    return bool(entries) and len({*names}) == len(names) and len({*keys}) == len(keys)


def check_random_files(folder: Path, seed: int, count: int) -> None:
    random_source = random.Random(seed)
    file = folder / "keys.yaml"
    num_valid = 0
    for _ in range(count):
        pool = VALUES if random_source.random() < 0.5 else VALID
        entries = [
            {name: random_source.choice(pool[name]) for name in pool if random_source.random() < 0.85 or name == "key"}
            for _ in range(random_source.randint(0, 3))
        ]
        file.write_text(yaml.safe_dump(entries, allow_unicode=True))
        if is_valid(entries):
            num_valid += 1
            assert [key.key for key in read_api_key_file(str(file))] == [entry["key"] for entry in entries]
        else:
            with pytest.raises(ConfigError) as caught:
                read_api_key_file(str(file))
            assert str(file) in str(caught.value) and "sesame" not in str(caught.value), entries
    assert num_valid > count / 20


def test_random_files_are_read_or_refused(tmp_path: Path) -> None:
    check_random_files(tmp_path, 0, 200)


@pytest.mark.nightly
def test_a_thousand_random_files_are_read_or_refused(tmp_path: Path) -> None:
    check_random_files(tmp_path, 1, 1000)


def test_no_file_and_no_flag_is_no_key() -> None:
    assert add_plain_keys((), ()) == () == parse_serve_args(["demo"]).server.keys


def test_several_keys_leave_room_for_each_other(tmp_path: Path) -> None:
    assert parse(tmp_path, FULL).engine.scheduler.max_client_share == 0.875
    assert parse(tmp_path, FULL, "--max-client-share", "0.5").engine.scheduler.max_client_share == 0.5
    assert parse_serve_args(["demo", "--api-key", "a", "--api-key", "b"]).engine.scheduler.max_client_share == 0.875
    assert parse_serve_args(["demo", "--api-key", "a"]).engine.scheduler.max_client_share is None
