"""What a record may refer to: files of its folder or archive, and nothing outside of it."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from files_made import picture, served, write

from mmjax.data.sample import BadSample
from mmjax.data.storage.archives import MediaFolder
from mmjax.errors import UserError


def folder(root: Path | str, tmp_path: Path, outside="refuse") -> MediaFolder:
    return MediaFolder(str(root), outside, tmp_path / "cache")


def refused(inside: MediaFolder, reference: str) -> str:
    with pytest.raises(BadSample) as error:
        inside.find(reference).read()
    return str(error.value)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with an image, a secret beside it, and links to both."""
    write(
        tmp_path,
        {"photos/a.png": picture(), "photos/sub/b.png": picture(colour=2), "secret.png": b"secret"},
    )
    os.symlink(tmp_path / "secret.png", tmp_path / "photos" / "link.png")
    os.symlink(tmp_path, tmp_path / "photos" / "up")
    os.symlink("a.png", tmp_path / "photos" / "same.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "reference",
    [
        "../secret.png",
        "sub/../../secret.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1/x",
        "..",
    ],
)
def test_what_points_outside_is_refused_by_name(
    photos: Path, tmp_path: Path, reference: str
) -> None:
    told = refused(folder(photos, tmp_path), reference)
    assert reference in told
    assert "points outside" in told


@pytest.mark.parametrize("reference", ["link.png", "up/secret.png"])
def test_a_link_that_leads_outside_is_refused(photos: Path, tmp_path: Path, reference: str) -> None:
    assert "is a link that leads outside" in refused(folder(photos, tmp_path), reference)
    assert folder(photos, tmp_path, "allow").find(reference).read() == b"secret"


def test_what_stays_inside_is_read_also_by_a_link_or_a_detour(photos: Path, tmp_path: Path) -> None:
    inside = folder(photos, tmp_path)
    for reference in ("a.png", "./a.png", "sub/../a.png", "same.png", "up/photos/a.png"):
        assert inside.find(reference).read() == picture()


def test_outside_allowed_reads_absolute_paths_and_urls(photos: Path, tmp_path: Path) -> None:
    open_to_all = folder(photos, tmp_path, "allow")
    with pytest.raises(BadSample, match="nosuch://here: fsspec cannot open it"):
        open_to_all.find("nosuch://here/a.png").read()
    for reference in (
        "../secret.png",
        str(tmp_path / "secret.png"),
        f"file://{tmp_path}/secret.png",
    ):
        assert open_to_all.find(reference).read() == b"secret"


def test_what_is_no_file_is_refused_and_never_waited_for(photos: Path, tmp_path: Path) -> None:
    os.mkfifo(photos / "pipe.png")
    inside = folder(photos, tmp_path)
    assert "is not a file" in refused(inside, "pipe.png")
    assert "is not a file" in refused(inside, "sub")
    assert "is missing" in refused(inside, "gone.png")
    assert "is missing" in refused(inside, "a.png/b.png")
    assert "without a name" in refused(inside, "")
    assert "without a name" in refused(inside, "a\0b")
    assert "cannot be read" in refused(inside, "x" * 300)
    assert "base64" in refused(inside, "data:image/png;base64,%%%")
    assert r"not Unicode text: 'a\ud800.png'" in refused(inside, "a\ud800.png")
    assert r"not Unicode text: 'data:,\udfff'" in refused(inside, "data:,\udfff")


def make_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.png", picture())
        archive.writestr("./sub/b.png", picture(60, 60), zipfile.ZIP_DEFLATED)
        archive.writestr("../out.png", b"outside")
        link = zipfile.ZipInfo("link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("z.png", b"123", zipfile.ZIP_LZMA)
    return path


def make_tar(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("a.png", picture()),
            ("./sub/b.png", picture(60, 60)),
            ("../out.png", b"outside"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return path


@pytest.mark.parametrize(("make", "name"), [(make_zip, "p.zip"), (make_tar, "p.tar")])
def test_members_of_an_archive_are_read_where_they_lie(tmp_path: Path, make, name: str) -> None:
    make(tmp_path / name)
    for _ in range(2):  # the second finds the index of the first
        inside = folder(tmp_path / name, tmp_path)
        for reference, content in (
            ("a.png", picture()),
            ("sub/b.png", picture(60, 60)),
            ("sub/../a.png", picture()),
        ):
            assert inside.find(reference).read() == content
            with inside.find(reference).open() as file:
                assert file.read(20) == content[:20]
                file.seek(-4, io.SEEK_END)
                assert file.read() == content[-4:]
    assert "points outside" in refused(inside, "../out.png")
    assert "is missing" in refused(inside, "out.png")
    assert "link.png is a link" in refused(inside, "link.png")
    assert "is missing" in refused(inside, "gone.png")
    if name == "p.zip":
        assert "unknown method" in refused(inside, "z.png")


@pytest.mark.parametrize(("make", "name"), [(make_zip, "p.zip"), (make_tar, "p.tar")])
def test_an_archive_behind_http_gives_one_member_without_the_rest(
    tmp_path: Path, make, name: str
) -> None:
    write(tmp_path / "site", {})
    (tmp_path / "site").mkdir(exist_ok=True)
    make(tmp_path / "site" / name)
    with served(tmp_path / "site") as server:
        inside = folder(f"{server.url}/{name}", tmp_path)
        assert inside.find("a.png").read() == picture()
        before = server.given
        assert inside.find("sub/b.png").read() == picture(60, 60)
        assert server.given - before < (tmp_path / "site" / name).stat().st_size / 2


def test_a_member_that_inflates_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    content = zipfile_with_wrong_size(tmp_path / "bomb.zip")
    assert len(content) < 10_000
    told = refused(folder(tmp_path / "bomb.zip", tmp_path), "bomb.png")
    assert "is truncated or corrupt" in told


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_member_that_does_not_go_with_its_checksum_is_refused_as_by_unzip(
    tmp_path: Path, method: int
) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", picture(), method)
        crc = archive.getinfo("a.png").CRC.to_bytes(4, "little")
    spoiled = (tmp_path / "a.zip").read_bytes().replace(crc, bytes(4))
    (tmp_path / "a.zip").write_bytes(spoiled)
    assert "a.zip::a.png is corrupt: its bytes do not go" in refused(
        folder(tmp_path / "a.zip", tmp_path), "a.png"
    )


def zipfile_with_wrong_size(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", bytes(5_000_000))
    content = path.read_bytes().replace(
        (5_000_000).to_bytes(4, "little"), (100).to_bytes(4, "little")
    )
    path.write_bytes(content)
    return content


def test_a_member_that_claims_more_than_is_read_of_one_is_refused_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    zipfile_with_wrong_size(tmp_path / "a.zip")
    claimed = (
        (tmp_path / "a.zip")
        .read_bytes()
        .replace((100).to_bytes(4, "little"), (1 << 30).to_bytes(4, "little"))
    )
    (tmp_path / "a.zip").write_bytes(claimed)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        member = tarfile.TarInfo("bomb.png")
        member.size = 1 << 30
        archive.fileobj.write(member.tobuf())
        archive.fileobj.truncate(2048 + member.size)  # a hole
        archive.fileobj.seek(0, io.SEEK_END)
    for name in ("a.zip", "b.tar"):
        told = refused(folder(tmp_path / name, tmp_path), "bomb.png")
        assert (
            f"{name}::bomb.png has 1,073,741,824 bytes, more than the 536,870,912 that are read of one"
            in told
        )


def test_a_broken_or_compressed_archive_is_fatal(tmp_path: Path) -> None:
    write(tmp_path, {"a.zip": b"PK\x03\x04 no", "b.tar": b"1" * 600, "c.tar.gz": b"\x1f\x8b"})
    for name, told in (
        ("a.zip", "cannot be read"),
        ("b.tar", "cannot be read"),
        ("c.tar.gz", "unpack it"),
    ):
        with pytest.raises(UserError, match=told) as error:
            folder(tmp_path / name, tmp_path).find("x.png")
        assert name in str(error.value)


def test_an_absolute_path_into_the_folder_is_inside_and_others_name_the_key_that_allows_them(
    photos, tmp_path
) -> None:
    inside = MediaFolder(str(photos), "refuse", tmp_path / "cache", "data.sources.mine.outside")
    for path in (photos / "a.png", photos / "sub" / ".." / "a.png", photos / "same.png"):
        assert inside.find(str(path)).read() == picture()
    for path in (
        tmp_path / "secret.png",
        photos / "link.png",
        f"{photos}/../secret.png",
        f"{photos}2/a.png",
    ):
        told = refused(inside, str(path))
        assert told.endswith("(data.sources.mine.outside=allow reads it)")
