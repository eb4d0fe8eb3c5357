"""Videos' headers tell their lengths without decoding; what is decoded always has these lengths, or is bad media."""

from __future__ import annotations

import io
import resource
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from clips_made import frames_of, write_video
from PIL import Image

from mmjax.config import MediaLimits, Qwen2Video, Qwen3Video, UniformVideo, VisionConfig
from mmjax.data.media import video_header
from mmjax.data.media.decode import VideoHeader, check_media_size, limit_violations
from mmjax.data.media.matroska import read_matroska_header
from mmjax.data.media.preparations import sample_video
from mmjax.data.media.video import decode_video
from mmjax.data.media.video_header import read_video_header
from mmjax.data.storage.files import LocalFile
from mmjax.data.storage.media_files import FrameFiles
from mmjax.errors import BadMedia

EVERY = UniformVideo(frames=6, size=())


def encoder_of(how=EVERY, frames: int = 1) -> VisionConfig:
    return VisionConfig(1, 8, 1, 8, 4, frames=frames, videos=how)


def header_of(content: bytes) -> VideoHeader:
    return VideoHeader.unpacked(read_video_header(io.BytesIO(content)))


def decoded(content: bytes, how=EVERY, frames: int = 1) -> np.ndarray:
    return np.concatenate(decode_video(io.BytesIO(content), encoder_of(how, frames)))


@pytest.mark.parametrize(
    ("codec", "ending"),
    [
        ("mpeg4", "mp4"),
        ("libx264", "mov"),
        ("libx264", "mkv"),
        ("libvpx-vp9", "webm"),
        ("mpeg4", "avi"),
    ],
)
def test_a_header_counts_the_frames_that_there_are(codec: str, ending: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for count, rate in ((1, Fraction(25)), (7, Fraction(30_000, 1001)), (40, Fraction(12))):
        path = write_video(
            tmp_path / f"{count}.{ending}", frames_of(rng, count, 48, 80), rate, codec
        )
        header = header_of(path.read_bytes())
        assert (header.frames, header.height, header.width, header.rate) == (count, 48, 80, rate)
        assert decoded(path.read_bytes()).shape == (6, 48, 80, 3)


def test_a_file_that_names_other_files_or_ports_is_no_video(tmp_path: Path, monkeypatch) -> None:
    write_video(tmp_path / "v.ts", frames_of(np.random.default_rng(0), 4, 32, 32), 10, "mpeg2video")
    monkeypatch.chdir(tmp_path)
    stream = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{}\n#EXT-X-ENDLIST\n"
    for text in (
        "ffconcat version 1.0\nfile v.ts\n",
        f"ffconcat version 1.0\nfile '{tmp_path}/v.ts'\n",
        stream.format("v.ts"),
        stream.format(f"file://{tmp_path}/v.ts"),
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    ):
        with pytest.raises(BadMedia, match="no video that FFmpeg can open"):
            video_header.open_container(io.BytesIO(text.encode()))
    assert header_of((tmp_path / "v.ts").read_bytes()).frames >= 3


def test_frames_are_those_at_their_numbers_however_far_apart_the_key_frames_are(
    tmp_path: Path,
) -> None:
    """Seeking beside decoding everything: the same frames, of few or many key frames."""
    rng = np.random.default_rng(1)
    for key_every in (5, 300):
        path = write_video(
            tmp_path / f"{key_every}.mp4",
            frames_of(rng, 300, 32, 32),
            30,
            "libx264",
            key_every=key_every,
        )
        with av.open(str(path)) as container:
            every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        for count in (2, 3, 20):
            ours = decoded(path.read_bytes(), UniformVideo(frames=count, size=()))
            np.testing.assert_array_equal(
                ours, np.stack([every[int(300 * (k + 0.5) / count)] for k in range(count)])
            )


def test_a_video_that_lies_on_its_side_is_turned_upright(tmp_path: Path) -> None:
    frames = frames_of(np.random.default_rng(0), 6, 48, 80)
    upright = decoded(write_video(tmp_path / "0.mp4", frames, 10).read_bytes())
    for turned, turns in ((90, 1), (-90, 3), (180, 2)):
        content = write_video(tmp_path / f"{turned}.mp4", frames, 10, turned=turned).read_bytes()
        header = header_of(content)
        assert (header.height, header.width) == ((80, 48) if turns % 2 else (48, 80))
        np.testing.assert_array_equal(decoded(content), np.rot90(upright, turns, axes=(1, 2)))


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_frames_at_a_variable_rate_are_as_many_as_the_header_promises(
    ending: str, tmp_path: Path
) -> None:
    frames = frames_of(np.random.default_rng(0), 30, 32, 32)
    times = [k * k for k in range(30)]  # 28 s at up to 30 frames per second
    content = write_video(tmp_path / f"a.{ending}", frames, 30, "libx264", times=times).read_bytes()
    header = header_of(content)
    assert 24 < header.frames / float(header.rate) < 29
    how = Qwen2Video(fps=2.0, min_pixels=64, max_pixels=32 * 32)
    sampled = sample_video(encoder_of(how, 2), header)
    made = decoded(content, how, 2)
    assert len(made) == len(sampled.indices)
    # Frames get lighter with time, and are taken in its order.
    levels = made.mean(axis=(1, 2, 3))
    assert (np.diff(levels) > -1).all()
    assert levels[-1] > levels[0] + 10


def test_a_video_that_lacks_its_last_frames_repeats_the_last_and_one_that_lacks_more_is_bad(
    tmp_path: Path,
) -> None:
    frames = frames_of(np.random.default_rng(0), 100, 32, 32)
    content = write_video(tmp_path / "a.mkv", frames, 25, "mpeg4", key_every=1).read_bytes()
    header = header_of(content)
    assert header.frames == 100
    with av.open(io.BytesIO(content)) as container:
        starts = [packet.pos for packet in container.demux(video=0) if packet.size]
    how = UniformVideo(frames=100, size=())
    almost = decoded(content[: starts[97]], how)
    assert len(almost) == 100
    np.testing.assert_array_equal(almost[97:], almost[[96] * 3])
    with pytest.raises(
        BadMedia, match=r"truncated video: it ends \d\.\d s before the 4\.0 s of its header"
    ):
        decoded(content[: starts[50]], how)


def test_no_cut_or_overwritten_file_ends_in_anything_but_the_planned_frames_or_bad_media(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    for codec, ending in (("mpeg4", "mp4"), ("libx264", "mkv")):
        content = write_video(
            tmp_path / f"a.{ending}", frames_of(rng, 24, 32, 48), 25, codec
        ).read_bytes()
        for _ in range(40):
            damaged = bytearray(content[: rng.integers(1, len(content) + 1)])
            for at in rng.integers(0, len(damaged), rng.integers(0, 20)):
                damaged[at] = rng.integers(256)
            try:
                header = header_of(bytes(damaged))
                sampled = sample_video(encoder_of(), header)
                made = decoded(bytes(damaged))
            except BadMedia:
                continue
            assert made.shape == (len(sampled.indices), *sampled.size, 3)


@pytest.mark.parametrize("sound", [False, True], ids=["alone", "with sound"])
@pytest.mark.parametrize(("ending", "codec"), [("mkv", "libx264"), ("webm", "libvpx-vp9")])
def test_matroska_is_read_as_ffmpeg_reads_it_without_opening_a_codec(
    ending: str, codec: str, sound: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    track = np.zeros((1, 30_000), np.float32) if sound and ending == "mkv" else None
    for count, rate in (
        (1, 25),
        (7, Fraction(30_000, 1001)),
        (31, Fraction(450, 367)),
        (24, Fraction(1, 5)),
    ):
        path = write_video(
            tmp_path / f"{count}.{ending}", frames_of(rng, count, 48, 80), rate, codec, sound=track
        )
        with path.open("rb") as file:
            header = read_matroska_header(file)
            assert header == VideoHeader(count, 48, 80, Fraction(rate))
            file.seek(0)
            assert header == video_header._container_header(file)


def test_a_recording_of_unknown_length_is_left_to_ffmpeg(tmp_path: Path) -> None:
    """No duration, no rate, sizes that were never written, a file that ends in its header: none is guessed."""
    content = write_video(
        tmp_path / "a.mkv", frames_of(np.random.default_rng(0), 9, 32, 40), 10
    ).read_bytes()
    for name in (b"\x23\xe3\x83", b"\x16\x54\xae\x6b"):  # DefaultDuration, Tracks
        assert name in content
        other = content.replace(name, name[:-1] + b"\x85")
        assert read_matroska_header(io.BytesIO(other)) is None
    for end in range(4, content.index(b"\x1f\x43\xb6\x75"), 7):  # of the first cluster
        assert read_matroska_header(io.BytesIO(content[:end])) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "an empty file"),
        (b"no video at all, but some text", "no video that FFmpeg can open"),
        (b"\0\0\0\x14ftypisom\0\0\0\0isom", "without a moov box"),
    ],
)
def test_what_is_no_video_says_so(content: bytes, reason: str) -> None:
    with pytest.raises(BadMedia, match=reason):
        read_video_header(io.BytesIO(content))


def test_a_file_with_sound_alone_is_no_video(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 16_000), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(BadMedia, match="without a video track"):
        read_video_header(io.BytesIO(path.read_bytes()))


def test_ten_hours_are_refused_by_the_header_and_where_allowed_need_no_more_memory_than_the_frames_taken(
    tmp_path: Path,
) -> None:
    """Of 7,200 frames, one every five seconds, 8 are taken: key frames are skipped to."""
    path = tmp_path / "long.mkv"
    frames = frames_of(np.random.default_rng(0), 40, 64, 64)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(1, 5))
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = 64, 64, "yuv420p", 50
        for number in range(7_200):
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(frames[number % 40], format="rgb24"))
            )
        container.mux(stream.encode())
    with path.open("rb") as file:
        size = read_video_header(file)
        with pytest.raises(
            BadMedia, match=r"a video of 36000\.0 s of 64 x 64 pixels is longer than 3600 s"
        ):
            check_media_size("video", size, MediaLimits())
        before = resource.getrusage(resource.RUSAGE_SELF)
        how = UniformVideo(frames=8, size=())
        made = decode_video(file, encoder_of(how), MediaLimits(seconds=1e6))
        after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(made) == 8
    assert after.ru_maxrss - before.ru_maxrss < 32 << 10  # KiB; all frames have 88 MB
    differences = [np.abs(made[4][0].astype(int) - frame).mean() for frame in frames]
    assert int(np.argmin(differences)) == 4050 % 40


def test_headers_survive_packing_and_every_limit_sees_them() -> None:
    header = VideoHeader(1_080_000, 2160, 3840, Fraction(30_000, 1001))
    assert VideoHeader.unpacked(header.packed()) == header
    assert VideoHeader.unpacked(VideoHeader(3, 5, 7, Fraction(0)).packed()) == VideoHeader(
        3, 5, 7, Fraction(0)
    )
    sizes = np.array([header.packed(), VideoHeader(30, 10, 4000, Fraction(30)).packed()], np.int64)
    violated = limit_violations("video", sizes, MediaLimits(seconds=3600, aspect=100))
    assert {reason: found.tolist() for reason, found in violated.items() if found.any()} == {
        " is longer than 3600 s": [True, False],
        ": one side is more than 100 times the other": [False, True],
    }


def test_a_list_of_images_is_a_video_whose_frames_are_all_taken(tmp_path: Path) -> None:
    frames = frames_of(np.random.default_rng(0), 7, 32, 48)
    for number, pixels in enumerate(frames):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    files = FrameFiles(tuple(LocalFile(str(tmp_path / f"{number}.png")) for number in range(7)))
    with files.open() as file:
        first, second = read_video_header(file)
    header = VideoHeader.unpacked((files.counted(first), second))
    assert header == header_of(files.read()) == VideoHeader(7, 32, 48, Fraction(0))
    for how in (
        Qwen2Video(min_pixels=64, max_pixels=10**6),
        Qwen3Video(min_pixels=64, max_pixels=10**6),
    ):
        sampled = sample_video(encoder_of(how, 2), header)
        wanted = {"qwen2_video": [0, 1, 2, 3, 4, 5], "qwen3_video": [0, 1, 2, 3, 4, 5, 6, 6]}[
            how.kind
        ]
        assert sampled.indices.tolist()[:5] == wanted[:5]
        assert len(sampled.indices) == len(wanted)
    np.testing.assert_array_equal(
        decoded(files.read(), UniformVideo(frames=7, size=())), np.stack(frames)
    )
    Image.fromarray(frames[0][:, :40]).save(tmp_path / "3.png")
    with pytest.raises(BadMedia, match="a frame of 32 x 40 pixels in a video of 32 x 48"):
        decoded(files.read(), UniformVideo(frames=7, size=()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ending", "codec"), [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("webm", "libvpx-vp9")]
)
def test_one_core_reads_the_headers_of_two_thousand_files_in_a_second(
    ending: str, codec: str, tmp_path: Path
) -> None:
    frames = frames_of(np.random.default_rng(0), 50, 96, 128)
    content = write_video(tmp_path / f"a.{ending}", frames, 30, codec).read_bytes()
    paths = [tmp_path / f"{number}.{ending}" for number in range(500)]
    for path in paths:
        path.write_bytes(content)
    best = np.inf
    for _ in range(5):
        start = time.process_time()
        for path in paths:
            with path.open("rb") as file:
                read_video_header(file)
        best = min(best, time.process_time() - start)
    assert len(paths) / best >= 2000
